# SPDX-License-Identifier: Apache-2.0
"""Which failure is raised, and its words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from ddpilot.errors import RankError
from ddpilot.launching import first_failure
from ddpilot.launching.exception_report import render_unsent
from ddpilot.launching.first_failure import (
    ENDING_LIMIT_S,
    SETTLE_S,
    VICTIM_GRACE_S,
    RankEnd,
    build_error,
    choose_failure,
    is_ending,
)
from ddpilot.launching.rank_reports import Exited, Raised
from ddpilot.user_files import CodeLine


def raising(rank: int, at_s: float, *, since_s: float = 0.0, is_victim: bool = False, **fields: Any) -> RankEnd:
    """A rank that raised `at_s`, known to the parent `since_s`."""
    said: dict[str, Any] = {"type_name": "ValueError", "message": "bad", "traceback": "", "exitcode": 1, **fields}
    raised = Raised(time_s=at_s, is_victim=is_victim, interrupted=False, **said)
    return RankEnd(rank=rank, raised=raised, error=ValueError("bad"), since_s=since_s)


def ending(rank: int, status: int, at_s: float = 1.0) -> RankEnd:
    """A rank whose process ended with `status` as os.wait gives it."""
    exited = Exited(rank=rank, status=status, peak_memory_bytes=11_200_000_000, time_s=at_s)
    return RankEnd(rank=rank, exited=exited, since_s=0.0)


def error_of(failure: RankEnd, **fields: Any) -> RankError:
    """The parent's error for `failure` of two ranks that ran `train`."""
    given: dict[str, Any] = {"num_ranks": 2, "last_lines": (), "victims": (), "returned": (), **fields}
    return build_error(failure, function_name="train", **given)


def test_choose_failure_takes_the_first_cause_in_time_not_in_arrival() -> None:
    """A report that came second but happened first is the cause."""
    late, early = raising(0, 5.0), raising(1, 4.0)
    assert choose_failure([late, early], now_s=1.0) is early


def test_choose_failure_waits_a_moment_for_an_earlier_cause() -> None:
    """A cause waits `SETTLE_S`, no longer."""
    first_failure = [raising(0, 5.0)]
    assert choose_failure(first_failure, now_s=SETTLE_S / 2) is None
    assert choose_failure(first_failure, now_s=SETTLE_S) is first_failure[0]
    assert choose_failure([], now_s=100.0) is None


def test_choose_failure_takes_the_rank_that_a_joint_error_is_about() -> None:
    """All ranks raise it; the named rank has `VICTIM_GRACE_S` to report. A text of the user's names no rank."""
    joint: Any = {"type_name": "NonFiniteError", "message": "[rank 1] computing the loss: nan"}
    first, named = raising(2, 1.0, **joint), raising(1, 1.1, **joint)
    assert choose_failure([first, named], SETTLE_S) is named
    assert choose_failure([named], SETTLE_S) is named
    assert choose_failure([first], SETTLE_S) is None
    assert choose_failure([first], VICTIM_GRACE_S) is first
    own = raising(2, 1.0, message="[rank 1] bad")
    assert choose_failure([own, named], SETTLE_S) is own


def test_choose_failure_lets_a_victim_wait_for_its_cause() -> None:
    """A victim that happened earlier yields to a cause that comes within `VICTIM_GRACE_S`, and else is raised."""
    victim, cause = raising(0, 1.0, is_victim=True), ending(1, signal.SIGKILL, at_s=1.1)
    assert choose_failure([victim], now_s=VICTIM_GRACE_S * 0.9) is None
    assert choose_failure([victim, cause], now_s=VICTIM_GRACE_S * 0.9) is cause
    assert choose_failure([victim], now_s=VICTIM_GRACE_S) is victim


def test_choose_failure_lets_a_victim_wait_while_a_silent_rank_is_exiting() -> None:
    """On a busy machine the news of a death comes late; the connection that it closed was noticed at once."""
    victim = raising(0, 1.0, is_victim=True)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert choose_failure([victim], VICTIM_GRACE_S, lambda: [os.getpid(), ended.pid]) is None
        assert choose_failure([victim], ENDING_LIMIT_S, lambda: [ended.pid]) is victim
    assert choose_failure([victim], VICTIM_GRACE_S, lambda: [os.getpid()]) is victim


def test_build_error_chains_the_original_and_names_rank_type_and_message() -> None:
    """The user can catch it and look at the exception that the rank raised."""
    failure = raising(1, 1.0, traceback="Traceback (most recent call last):\n  boom\n")
    error = error_of(failure, last_lines=("step 1", "step 2"), victims=[0])
    assert error.__cause__ is failure.error
    assert (error.rank, error.exitcode, error.signal_name) == (1, 1, None)
    text = str(error)
    assert text.startswith("rank 1 raised ValueError: bad (running `train` on 2 ranks on ")
    assert "Traceback (most recent call last):\n  boom" in text
    assert "Last output of rank 1:\n  step 1\n  step 2" in text
    assert text.endswith("Rank 0 failed because of it (a connection to a rank went away).")


def test_build_error_points_to_no_other_failure_where_none_is_known() -> None:
    """A lost connection that nothing explains, as of a download, is the first failure itself."""
    text = str(
        error_of(raising(0, 1.0, type_name="ConnectionResetError", message="[Errno 104] Connection reset by peer"))
    )
    assert "which the finding names" not in text
    assert "no rank is known to have failed before that" in text


@pytest.mark.parametrize(
    ("status", "words", "signal_name", "exitcode"),
    [
        (
            signal.SIGKILL,
            "rank 2 was killed by SIGKILL; the kernel's OOM killer is the usual cause; its peak was 11.2 GB",
            "SIGKILL",
            -9,
        ),
        (signal.SIGABRT | 0x80, "rank 2 was aborted (SIGABRT): C++ code called abort", "SIGABRT", -6),
        (signal.SIGSEGV, "rank 2 crashed with SIGSEGV; its peak was 11.2 GB", "SIGSEGV", -11),
        (signal.SIGTERM, "rank 2 was killed by SIGTERM", "SIGTERM", -15),
        (40, "rank 2 was killed by signal 40", "signal 40", -40),
        (0, "rank 2 exited with code 0 before `train` returned", None, 0),
        (7 << 8, "rank 2 exited with code 7 before `train` returned", None, 7),
    ],
)
def test_build_error_says_the_end_of_a_process_in_words(
    status: int, words: str, signal_name: str | None, exitcode: int
) -> None:
    """Signals by name with their usual cause and the peak memory; exit codes as numbers."""
    error = error_of(ending(2, status))
    assert str(error).startswith(words)
    assert (error.signal_name, error.exitcode) == (signal_name, exitcode)


def test_build_error_says_why_the_watchdog_of_nccl_ended_a_process() -> None:
    """In its words, and without the line at which the main thread happened to be."""
    lines = (
        "[PG ID 0 Rank 0] Process group watchdog thread terminated with exception: NCCL error: remote process",
        "Current thread 0x1 (most recent call first):",
        '  File "net.py", line 3 in forward',
    )
    said = str(error_of(ending(2, signal.SIGABRT | 0x80), last_lines=lines))
    words = (
        "rank 2 was aborted (SIGABRT): the watchdog of its device's collectives ended it: NCCL error: remote process; "
    )
    assert said.startswith(words)


def test_build_error_names_the_python_line_of_a_crash() -> None:
    """The line comes from the fault handler's report in the rank's output."""
    lines = ("Current thread 0x1 (most recent call first):", '  File "net.py", line 3 in forward')
    assert "crashed with SIGSEGV at net.py:3 in forward;" in str(error_of(ending(0, signal.SIGSEGV), last_lines=lines))


def test_build_error_says_that_the_control_descriptor_was_closed() -> None:
    """The rank wrote that to stderr; the exit code of its process does not matter."""
    lines = ("Traceback", render_unsent(0, "train", "Bad file descriptor").rstrip())
    error = error_of(ending(0, 1 << 8), last_lines=lines)
    assert (
        error.found == "rank 0 closed the descriptor on which the outcome of `train` is sent, as `os.closerange` does"
    )
    assert error.fix.startswith("Close only what you opened")
    other = error_of(ending(0, 1 << 8), last_lines=("ddpilot: rank 0: the outcome of `other` cannot be sent (x)",))
    assert "os._exit" in other.fix


def test_build_error_says_sys_exit_with_its_code() -> None:
    """`sys.exit(3)` in a rank is a failure with that exit code."""
    error = error_of(raising(0, 1.0, type_name="SystemExit", exitcode=3))
    assert str(error).startswith("rank 0 called sys.exit with code 3")
    assert error.exitcode == 3


def test_build_error_asks_for_the_number_of_steps_when_a_rank_returned_early() -> None:
    """A victim without a cause, and a rank that returned, mean unequal numbers of steps."""
    lost: Any = {"type_name": "RuntimeError", "message": "Connection closed by peer [127.0.0.1]:4000"}
    error = error_of(raising(1, 1.0, is_victim=True, traceback="Traceback ...", **lost), returned=[0])
    asked = (
        "Rank 0 had already returned and could not take part: do all ranks run the same steps, with the same shapes?"
    )
    assert str(error).partition("\n")[0].endswith(f"). {asked}")
    assert "no rank is known to have failed" not in str(error)


def test_error_of_a_rank_that_asks_to_be_started_again_says_so() -> None:
    """Exit code 75, by `sys.exit` or by a process of a script, without the traceback of SystemExit."""
    left = raising(0, 1.0, type_name="SystemExit", exitcode=75, traceback="Traceback ...")
    for failure in (left, ending(0, 75 << 8)):
        error = error_of(failure)
        assert error.exitcode == 75
        assert error.render().startswith("rank 0 exited with code 75 (EX_TEMPFAIL), which asks for a restart")
        assert "Run the same again: a Loop exits so after saving, and resumes from there" in error.render()
        assert error.rank_traceback == ""


def test_build_error_adds_no_page_to_what_ddpilot_says_of_pickling() -> None:
    """ShipError quotes Python's message and names the object; the page's general advice would contradict it."""
    message = "could not send back what `f` returned: `result` cannot pickle 'generator' object. Return its values"
    assert "DDP113" in str(error_of(raising(0, 1.0, type_name="TypeError", message=message)))
    assert "DDP113" not in str(error_of(raising(0, 1.0, type_name="ShipError", message=message)))


OWN = os.path.join(os.path.dirname(first_failure.__file__), "rank_server", "rank.py")
REPORT = [
    "step 1",
    "Fatal Python error: Segmentation fault",
    "",
    "Current thread 0x00007f (most recent call first):",
    '  File "/project/net.py", line 12 in forward',
    '  File "/project/train.py", line 40 in train',
    f'  File "{OWN}", line 51 in _run',
    '  File "<string>", line 1 in <module>',
    "",
    "Extension modules: numpy._core, torch._C (total: 30)",
]


def test_find_crash_line_gives_the_innermost_line_of_the_crashed_thread() -> None:
    """The first frame of the stack is where Python was."""
    assert first_failure.find_crash_line(REPORT) == "/project/net.py:12 in forward"


def test_find_crash_line_passes_over_what_looks_on_between_torch_and_the_user() -> None:
    """The line of the user's that called torch, and not that of the function around torch's which notes it."""
    package = os.path.dirname(os.path.dirname(first_failure.__file__))
    probe = f'  File "{os.path.join(package, "guard", "probe.py")}", line 191 in wrapper'
    library = f'  File "{os.path.join(os.path.dirname(os.__file__), "json", "decoder.py")}", line 3 in decode'
    assert first_failure.find_crash_line([*REPORT[:4], library, probe, *REPORT[5:]]) == "/project/train.py:40 in train"
    assert first_failure.find_crash_line([*REPORT[:4], probe]) is not None


def test_find_crash_line_gives_none_without_a_stack() -> None:
    """Lines that only look like frames are not taken for a stack."""
    assert first_failure.find_crash_line(["nothing", '  File "/project/net.py", line 12 in forward']) is None
    assert first_failure.find_crash_line([]) is None


def test_tidy_lines_drops_the_launcher_and_the_list_of_modules() -> None:
    """What is left is the user's: printed lines, the signal, the user's frames."""
    assert first_failure.tidy_lines(REPORT) == tuple(REPORT[:6])


def test_tidy_lines_keeps_the_last_twenty() -> None:
    """A long output is cut at its beginning."""
    assert first_failure.tidy_lines(map(str, range(50))) == tuple(map(str, range(30, 50)))


def test_find_raised_line_gives_the_innermost_line_of_the_users() -> None:
    """Not that of torch, in which the error was raised, nor that of an error which led to this one."""
    library = os.path.join(os.path.dirname(os.__file__), "json", "decoder.py")
    traceback = (
        'Traceback (most recent call last):\n  File "/project/net.py", line 3, in load\n    open(path)\n'
        "FileNotFoundError: weights\n\nDuring handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "/project/train.py", line 40, in <module>\n    run(parse(text))\n'
        f'  File "{library}", line 51, in parse\n    raise ValueError\nValueError: bad\n'
    )
    assert first_failure.find_raised_line(traceback) == CodeLine(
        "/project/train.py", 40, "<module>", "run(parse(text))"
    )
    assert first_failure.find_raised_line("") is None


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_is_ending_tells_processes_that_live_from_those_that_are_gone() -> None:
    """Also for a process that has not been reaped yet."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not is_ending(os.getpid())
        assert not is_ending(child.pid)
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_ending(child.pid)
    assert is_ending(child.pid)
