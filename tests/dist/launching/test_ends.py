# SPDX-License-Identifier: Apache-2.0
"""When a launch ends, all of its processes end: the stubborn, the detached, those of a dead parent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ddpilot import Launcher, LaunchTimeoutError, RankError
from tests.dist.launching.scripts import is_alive, running, wait_until


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
    """A rank exits as a script does: threads first, then exit handlers; the timeout names the rank."""

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


def test_exit_handlers_free_nothing_whose_destructor_waits(capfd: pytest.CaptureFixture[str]) -> None:
    """Such as a process group in a cycle; a process that exits frees nothing."""

    def leave_a_cycle() -> None:
        import atexit

        class Waits:
            def __del__(self) -> None:
                print("freed", flush=True)

        def end() -> list[list[int]]:
            one = Waits()
            one.itself = one  # type: ignore[attr-defined]
            del one
            return [[] for _ in range(100_000)]

        atexit.register(end)

    Launcher(nproc_per_node=1).run(leave_a_cycle)
    assert "freed" not in capfd.readouterr().out


def test_launch_says_that_a_rank_died_while_exiting(capfd: pytest.CaptureFixture[str]) -> None:
    """Its value was received, so the launch succeeds, with a notice about the crash in its exit handler."""

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


def _leave_with_a_handler(folder: Path) -> None:
    """Rank 0 is in its exit handlers when rank 1 raises, and has a handler of SIGTERM of its own."""
    import atexit

    def handle(_number: int, _frame: object) -> None:
        raise RuntimeError("Received SIGTERM: 15")

    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, handle)
        atexit.register(time.sleep, 600)
        atexit.register((folder / "leaves").touch)
        return
    while not (folder / "leaves").exists():
        time.sleep(0.005)
    raise ValueError("the first")


def test_a_rank_that_is_ended_in_its_exit_handlers_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The SIGTERM handler of a library, such as Lightning's, does not raise there: the error of the other is read."""
    with pytest.raises(RankError, match="rank 1 raised ValueError: the first"):
        Launcher(nproc_per_node=2).run(_leave_with_a_handler, tmp_path)
    assert "Received SIGTERM" not in "".join(capfd.readouterr())
