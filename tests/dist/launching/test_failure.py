# SPDX-License-Identifier: Apache-2.0
"""The first failure in time is raised in the parent, with rank, cause, lines and exit in words."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpilot import Launcher, RankError
from ddpilot.launching import first_failure
from tests.dist.launching.scripts import is_alive, run_script, wait_until

QUIET = Launcher(nproc_per_node=3, output="silent", timeout_s=60)


def training(event: Callable[[int, int], None]) -> None:
    """All-reduce for ever, `event(rank, step)` before each step."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    step = 0
    while True:
        event(dist.get_rank(), step)
        dist.all_reduce(torch.ones(10))
        step += 1


def error_of(event: Callable[[int, int], None], launcher: Launcher = QUIET) -> RankError:
    """The RankError of a training in which `event` happens."""
    with pytest.raises(RankError) as caught:
        launcher.run(training, event)
    return caught.value


def test_launch_raises_the_first_failure_with_the_others_as_its_victims() -> None:
    """ "The first failure in time is raised", original exception chained, while the others sit in an all_reduce."""

    def event(rank: int, step: int) -> None:
        if (rank, step) == (1, 3):
            print("about to fail")
            raise KeyError("bad sample")

    error = error_of(event)
    assert (error.rank, error.exitcode, error.signal_name) == (1, 1, None)
    assert isinstance(error.__cause__, KeyError)
    text = str(error)
    assert text.startswith("rank 1 raised KeyError: 'bad sample' (running `training` on 3 ranks on ")
    assert 'raise KeyError("bad sample")' in text, "the source line"
    assert "test_failure.py" in text
    assert "launching/rank_server" not in text, "no frame of the launcher"
    assert error.last_lines == ("about to fail",)


def test_launch_takes_the_earlier_of_two_causes(tmp_path: Path) -> None:
    """Two ranks raise, rank 0 as soon as rank 2 is gone: the earlier in time is the cause, not the lower in number."""

    def event(rank: int, step: int) -> None:
        if step == 2 and rank == 2:
            (tmp_path / "pid.writing").write_text(str(os.getpid()))
            (tmp_path / "pid.writing").rename(tmp_path / "pid")
        if step == 2 and rank == 0:
            wait_until((tmp_path / "pid").exists)
            wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
        if step == 2 and rank != 1:
            raise ValueError(f"of rank {rank}")

    error = error_of(event)
    assert error.rank == 2
    assert str(error.__cause__) == "of rank 2"


def test_launch_waits_for_the_cause_that_comes_after_its_victims(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "They wait 0.3 s for a cause": the others lose their connections before rank 1 raises the reason."""
    monkeypatch.setattr(first_failure, "VICTIM_GRACE_S", 10.0)  # however busy the machine is

    def event(rank: int, step: int) -> None:
        import torch.distributed as dist

        if (rank, step) == (1, 2):
            dist.destroy_process_group()
            time.sleep(0.1)
            raise ValueError("the cause")

    error = error_of(event)
    assert (error.rank, str(error.__cause__)) == (1, "the cause")


def test_launch_says_that_a_rank_had_returned_when_the_others_wait_for_it() -> None:
    """Unequal numbers of steps: the error of a waiting rank asks for that."""

    def unequal() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for _ in range(2 + dist.get_rank()):
            dist.all_reduce(torch.ones(1))

    with pytest.raises(
        RankError, match="Rank 0 had already returned and could not take part: do all ranks run the same"
    ):
        Launcher(nproc_per_node=2, output="silent", timeout_s=60, watch=False).run(unequal)


def _signal_self(number: int) -> Callable[[int, int], None]:
    def event(rank: int, step: int) -> None:
        if (rank, step) == (2, 2):
            os.kill(os.getpid(), number)

    return event


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, r"^rank 2 was killed by SIGKILL; the kernel's OOM killer is the usual cause; its peak was \d"),
        (signal.SIGSEGV, r"^rank 2 crashed with SIGSEGV at .*test_failure.py:\d+ in event; its peak was 0\.\d GB"),
        (signal.SIGABRT, r"^rank 2 was aborted \(SIGABRT\) at .*test_failure.py:\d+ in event: C\+\+ code called abort"),
    ],
)
def test_launch_says_which_signal_ended_a_rank(number: int, words: str) -> None:
    """ "Exit code or signal in words", for the kernel's and for C++'s; crashes with their Python line."""
    import re

    error = error_of(_signal_self(number))
    assert re.search(words, str(error)), str(error)
    assert (error.rank, error.signal_name, error.exitcode) == (2, signal.Signals(number).name, -number)


def test_launch_shows_the_message_when_gloo_aborts() -> None:
    """gloo gives up on tensors of different sizes: the rank, the usual reason and the C++ message."""

    def event(rank: int, step: int) -> None:
        import torch
        import torch.distributed as dist

        if step == 1:
            dist.all_reduce(torch.ones(1000 if rank else 100_000))

    error = error_of(event, replace(QUIET, watch=False))  # watched, the mismatch may be found before gloo aborts
    assert error.signal_name == "SIGABRT"
    assert "the usual cause over gloo is tensors that differ in size or dtype between ranks" in str(error)
    assert any("Received data size doesn't match expected size" in line for line in error.last_lines)


@pytest.mark.parametrize("code", [0, 7])
def test_launch_says_that_a_process_ended_before_the_function_returned(code: int) -> None:
    """`os._exit(0)` in the middle is a failure too: no value came."""

    def event(rank: int, step: int) -> None:
        if (rank, step) == (0, 1):
            os._exit(code)

    error = error_of(event)
    assert (error.rank, error.exitcode) == (0, code)
    assert f"rank 0 exited with code {code} before `training` returned" in str(error)
    assert "Look for `os._exit`" in str(error)
    assert ("or call `sys.exit(0)`: its value is then None" in str(error)) == (code == 0)


@pytest.mark.parametrize(("argument", "code"), [(3, 3), ("out of data", 1), (300, 300 & 0xFF)])
def test_launch_takes_sys_exit_for_a_failure_with_its_code(argument: int | str, code: int) -> None:
    """`sys.exit(3)` and `sys.exit("text")`, with the exit code of a script."""

    def leave() -> None:
        sys.exit(argument)

    with pytest.raises(RankError, match=rf"rank \d called sys.exit with code {code} ") as caught:
        QUIET.run(leave)
    assert caught.value.exitcode == code
    assert isinstance(caught.value.__cause__, SystemExit)


def test_launch_takes_sys_exit_without_a_code_for_a_return() -> None:
    """`sys.exit()` and `sys.exit(0)` end a script well."""
    assert list(QUIET.run(sys.exit)) == [None] * 3
    assert list(QUIET.run(sys.exit, 0)) == [None] * 3


def test_launch_reports_a_keyboard_interrupt_that_a_rank_raised_itself() -> None:
    """Nobody pressed Ctrl-C in the parent, so it is that rank's failure, not an interrupt of the launch."""

    def event(rank: int, step: int) -> None:
        if (rank, step) == (1, 1):
            raise KeyboardInterrupt

    error = error_of(event)
    assert error.rank == 1
    assert isinstance(error.__cause__, KeyboardInterrupt)


CELL = """
import ddpilot
source = "def train():\\n    samples = []\\n    return samples[3]  # the line\\n"
import linecache
linecache.cache["<ipython-input-7>"] = (len(source), None, source.splitlines(True), "<ipython-input-7>")
exec(compile(source, "<ipython-input-7>", "exec"))
try:
    ddpilot.launch(train, nproc_per_node=2)
except ddpilot.RankError as error:
    print(error.rank_traceback)
    raise error.__cause__
"""


def test_launch_shows_source_lines_of_functions_from_cells(tmp_path: Path) -> None:
    """ "Remote traceback with source lines", also for a function without a source file."""
    outcome = run_script(CELL, tmp_path, may_fail=True)
    assert 'File "<ipython-input-7>", line 3, in train\n    return samples[3]  # the line' in outcome.out
    assert outcome.err.rstrip().endswith("IndexError: list index out of range")


def test_launch_chains_causes_of_the_original_in_the_text() -> None:
    """`raise ... from` of the rank is in the traceback, and a failure of `init_group` reads as one message."""

    def fail() -> None:
        try:
            open("/no/such/file")
        except OSError as error:
            raise ValueError("no data") from error

    with pytest.raises(RankError, match="(?s)FileNotFoundError.*direct cause.*ValueError: no data"):
        QUIET.run(fail)


def test_launch_chains_an_exception_whose_class_only_the_rank_has() -> None:
    """The class travels with it, so that the parent can catch it by its base."""

    def fail() -> Any:
        class OfTheRankError(RuntimeError): ...

        raise OfTheRankError("made there")

    with pytest.raises(RankError, match=r"raised .*OfTheRankError: made there") as caught:
        QUIET.run(fail)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_launch_names_the_option_that_a_function_without_a_signature_was_given() -> None:
    """Only the call itself shows that it does not take it."""
    with pytest.raises(
        RankError, match=r"TypeError.*Options go to the launcher: `Launcher\(nproc_per_node=2\)"
    ) as caught:
        QUIET.run(int, nprocs=2)
    assert not caught.value.rank_traceback
