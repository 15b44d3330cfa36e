# SPDX-License-Identifier: Apache-2.0
"""The first failure in time is raised in the parent, with rank, cause, lines and exit in words."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ddpilot
from ddpilot import Launcher, LaunchTimeoutError, RankError
from ddpilot.launching import failures
from tests.dist.launching.scripts import is_alive, run_script, running, wait_until

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
    assert "launching/local" not in text, "no frame of the launcher"
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
    monkeypatch.setattr(failures, "VICTIM_GRACE_S", 10.0)  # however busy the machine is

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

    with pytest.raises(RankError, match="Rank 0 had already returned, so nobody answered: do all ranks run the same"):
        Launcher(nproc_per_node=2, output="silent", timeout_s=60).run(unequal)


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
        (signal.SIGABRT, r"^rank 2 was aborted \(SIGABRT\) at .*test_failure.py:\d+ in event: C\+\+ code gave up"),
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

    error = error_of(event)
    assert error.signal_name == "SIGABRT"
    assert "which gloo does when tensors of ranks differ in size or dtype" in str(error)
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


@pytest.mark.parametrize(("argument", "code"), [(3, 3), ("out of data", 1), (300, 300 & 0xFF)])
def test_launch_takes_sys_exit_for_a_failure_with_its_code(argument: int | str, code: int) -> None:
    """`sys.exit(3)` and `sys.exit("text")`, as a script's exit code would say."""

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
    """ "Remote traceback with source lines", also for a function whose source lies in no file."""
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


def unwilling(how: str, folder: Path) -> None:
    """Write down the processes that are hard to end, then fail on rank 0."""
    import subprocess

    rank = int(os.environ["RANK"])
    pids = [os.getpid()]
    if how == "ignores_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif how == "own_session":
        pids.append(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    elif how == "forked_daemon":
        if (child := os.fork()) == 0:
            os.setsid()
            time.sleep(600)
        pids.append(child)
    elif how == "data_loader":
        from torch.utils.data import DataLoader

        loader: Any = DataLoader(list(range(100)), num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
        next(iter(loader))
        import psutil

        pids += [child.pid for child in psutil.Process().children(recursive=True)]
    (folder / f"{rank}.writing").write_text(" ".join(map(str, pids)))
    (folder / f"{rank}.writing").rename(folder / f"{rank}")
    while not all((folder / str(each)).exists() for each in range(2)):
        time.sleep(0.005)
    if rank == 1 and how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:
        (folder / "failed_at").write_text(repr(time.monotonic()))
        raise ValueError("bad")
    while True:
        try:
            time.sleep(600)
        except BaseException:  # noqa: BLE001 - whatever it is, this rank stays
            continue


@pytest.mark.parametrize("how", ["plain", "ignores_sigterm", "own_session", "forked_daemon", "data_loader", "stopped"])
def test_launch_leaves_no_process_two_seconds_after_a_failure(how: str, tmp_path: Path) -> None:
    """ "All processes are gone within 2 s after a failure": the stubborn, the detached and the stopped ones too."""
    # A killed process cannot tidy up its temporary folder: pytest does it.
    launcher = Launcher(nproc_per_node=2, output="silent", timeout_s=60, env={"TMPDIR": str(tmp_path)})
    with pytest.raises(RankError, match="ValueError: bad"):
        launcher.run(unwilling, how, tmp_path)
    assert time.monotonic() - float((tmp_path / "failed_at").read_text()) < 2.0
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / str(rank)).read_text().split()]
    assert len(pids) == {"own_session": 4, "forked_daemon": 4, "data_loader": 6}.get(how, 2)
    assert [pid for pid in pids if is_alive(pid)] == []


def test_launch_ends_with_its_ranks_although_a_process_that_they_left_lives() -> None:
    """A detached process that holds a rank's pipes, and prints for ever, neither holds up the launch nor survives."""

    def leave_behind() -> list[int]:
        import subprocess

        pids = [subprocess.Popen(["yes", "y" * 1000], start_new_session=True).pid]
        if (child := os.fork()) == 0:
            os.setsid()
            time.sleep(600)
        return [*pids, child]

    results = Launcher(nproc_per_node=2, output="silent", timeout_s=30).run(leave_behind)
    assert [pid for pids in results for pid in pids if is_alive(pid)] == []


def test_launch_reports_a_failure_beside_a_thread_that_prints_without_end() -> None:
    """Reading a rank's last lines ends although more lines come."""

    def fail() -> None:
        import threading

        def chatter() -> None:
            while True:
                os.write(1, b"x" * 5000 + b"\n")

        threading.Thread(target=chatter, daemon=True).start()
        time.sleep(0.1)
        raise ValueError("bad")

    with pytest.raises(RankError, match="ValueError: bad"):
        Launcher(nproc_per_node=2, output="silent", timeout_s=30).run(fail)


def test_launch_ends_ranks_at_the_time_limit_and_shows_where_they_were(capfd: pytest.CaptureFixture[str]) -> None:
    """ "Timeouts": the ranks that had not returned are named, and their Python stacks are in the output."""

    def sleep_on_one() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(600)

    with pytest.raises(LaunchTimeoutError, match=r"rank 1 had not returned after `timeout_s=2.0`") as caught:
        Launcher(nproc_per_node=2, timeout_s=2.0).run(sleep_on_one)
    assert isinstance(caught.value, TimeoutError)
    assert "in sleep_on_one" in capfd.readouterr().err


def test_launch_waits_for_threads_and_exit_handlers_of_a_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank ends as a script does: its threads end first, then its exit handlers run; the time limit says so."""

    def leave_work(seconds: float) -> None:
        import atexit
        import threading

        def work() -> None:
            time.sleep(seconds)
            print("thread")

        atexit.register(print, "exit handler")
        threading.Thread(target=work).start()

    Launcher(nproc_per_node=1).run(leave_work, 0.2)
    assert capfd.readouterr().out == "[rank 0] thread\n[rank 0] exit handler\n"
    with pytest.raises(LaunchTimeoutError, match="rank 0 had returned and still ran a thread or an exit handler"):
        Launcher(nproc_per_node=1, timeout_s=2.0).run(leave_work, 600.0)


def test_launch_says_that_a_rank_died_while_exiting(capfd: pytest.CaptureFixture[str]) -> None:
    """Its value is there, so the launch succeeds, and the crash of its exit handler is said."""

    def crash_later() -> int:
        import atexit

        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
        return 5

    assert list(Launcher(nproc_per_node=1).run(crash_later)) == [5]
    assert "rank 0 returned, then died of SIGSEGV while exiting" in capfd.readouterr().err


PARENT = """
import os, sys, time, ddpilot
def train(folder):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    rank = os.environ["RANK"]
    with open(f"{folder}/{rank}.writing", "w") as file:
        file.write(f"{os.getpid()} {os.getppid()}")
    os.rename(f"{folder}/{rank}.writing", f"{folder}/{rank}")
    while True:
        time.sleep(600) if rank == "0" else dist.all_reduce(torch.ones(1))
ddpilot.launch(lambda: None, nproc_per_node=1)
if FORKED and os.fork() == 0:
    time.sleep(600)  # it holds every socket of its parent
ddpilot.launch(train, os.getcwd(), nproc_per_node=2)
"""


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "forked"])
def test_ranks_store_and_server_end_with_a_killed_parent(forked: bool, tmp_path: Path) -> None:
    """ "A dead parent takes its ranks along": kill -9, also while a fork of the parent holds its sockets."""
    with running(PARENT.replace("FORKED", str(forked)), tmp_path) as parent:
        wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        pids = {int(pid) for rank in range(2) for pid in (tmp_path / str(rank)).read_text().split()}
        assert len(pids) == 3, "two ranks and their server"
        import psutil

        server = next(pid for pid in pids if psutil.Process(pid).ppid() == parent.pid)
        pids |= {child.pid for child in psutil.Process(server).children(recursive=True)}
        assert len(pids) == 4, "and the store"
        parent.kill()
        wait_until(lambda: not any(map(is_alive, pids)), limit_s=2.0)


def test_launch_works_from_threads() -> None:
    """From a thread, and from two at once: each gets its own ranks' values."""
    from concurrent.futures import ThreadPoolExecutor

    def where(number: int) -> tuple[int, str]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()
        return number, os.environ["MASTER_PORT"]

    launcher = Launcher(nproc_per_node=2, output="silent", timeout_s=60)
    with ThreadPoolExecutor(3) as pool:
        values = [list(results) for results in pool.map(lambda number: launcher.run(where, number), range(3))]
    assert [[number for number, _ in pair] for pair in values] == [[0, 0], [1, 1], [2, 2]]
    assert len({pair[0][1] for pair in values}) == 3


def test_launch_works_in_a_forked_child_of_the_parent() -> None:
    """The child does not use its parent's server; the parent's still works afterwards."""
    before = ddpilot.launch(os.getppid, nproc_per_node=1)[0]
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            server = ddpilot.launch(os.getppid, nproc_per_node=1)[0]
            os.write(writer, str(server).encode())
            from ddpilot.launching.local.client import stop_servers

            stop_servers()
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as answer:
        server = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert int(server) != before
    assert ddpilot.launch(os.getppid, nproc_per_node=1)[0] == before


def test_launch_chains_an_exception_whose_class_only_the_rank_has() -> None:
    """The class travels with it, so that the parent can catch it by its base."""

    def fail() -> Any:
        class OfTheRankError(RuntimeError): ...

        raise OfTheRankError("made there")

    with pytest.raises(RankError, match=r"raised .*OfTheRankError: made there") as caught:
        QUIET.run(fail)
    assert isinstance(caught.value.__cause__, RuntimeError)
