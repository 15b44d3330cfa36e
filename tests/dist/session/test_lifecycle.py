# SPDX-License-Identifier: Apache-2.0
"""Start and end of sessions: several at once, unreferenced ones, parents that die, failed starts; nothing is left."""

from __future__ import annotations

import gc
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ddpilot import LaunchError, LaunchInterrupted, RankError, Session, launch
from ddpilot.launching.rank_server.client import server_pids, stop_servers
from tests.dist.launching.scripts import is_alive, run_script, running, wait_until
from tests.dist.session.conftest import Kept, pressing_stop

Start = Callable[..., Session]


def folders() -> set[str]:
    """Private folders of sessions that are there now."""
    return {path.name for path in Path(tempfile.gettempdir()).glob("ddpilot-*")}


def test_what_ranks_write_while_they_start_is_shown(start: Start, view: Kept) -> None:
    """Such as that they may not write a file as large as the flight ring."""
    stop_servers()  # those of other tests
    start(1).stop()
    (server,) = server_pids()
    unlimited = resource.prlimit(server, resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    try:
        start(1)
    finally:
        resource.prlimit(server, resource.RLIMIT_FSIZE, unlimited)
    assert view.raws[0].decode().count("collectives are not recorded: its file cannot be created ([Errno 27]") == 1


def test_session_is_refused_where_too_few_files_may_be_open() -> None:
    """Before anything is started: 4 ranks at `ulimit -n 60` would fail in the middle of a cell."""
    before = folders(), psutil.Process().children(recursive=True), os.listdir("/dev/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
    try:
        match = r"may have 60 files open at a time.*4 ranks need about \d+ in all. Run `ulimit -n 1024`"
        with pytest.raises(LaunchError, match=match):
            Session(4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert before == (folders(), psutil.Process().children(recursive=True), os.listdir("/dev/fd"))


def test_restart_of_a_rank_that_is_not_there_restarts_none(start: Start) -> None:
    """Counting from 1, or one of them twice: every variable is kept, or that rank's alone is lost."""
    session = start(2)
    session.execute("kept = rank")
    with pytest.raises(LaunchError, match="rank 2, and the ranks are 0 to 1"):
        session.restart([1, 2])
    assert session.pull("kept") == [0, 1]
    session.restart([0, 0])
    assert session.pull("globals().get('kept')") == [None, 1]


def test_a_restarted_rank_works_where_the_session_was_started(
    start: Start, view: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directory and path of the start, not of now; with the directory gone no rank is lost for a restart."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    session = start(2)
    monkeypatch.chdir(second)
    monkeypatch.syspath_prepend(str(second))
    session.restart(1)
    places = session.pull("(__import__('os').getcwd(), __import__('sys').path)")
    assert places[0] == places[1]
    assert places[0][0] == str(first)
    session.execute("kept = rank")
    first.rmdir()
    with pytest.raises(LaunchError, match="restarting rank 1: .*/first, the working directory of the session, was rem"):
        session.restart(1)
    assert session.pull("kept") == [0, 1]
    session.stop()
    assert view.raws == {}


def test_a_session_in_a_directory_that_was_removed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that says so; nothing is left."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    before = folders()
    with pytest.raises(LaunchError, match="starting a session: the working directory of this process was removed"):
        Session(1)
    with pytest.raises(LaunchError, match="the working directory of this process was removed"):
        launch(os.getpid)
    assert folders() == before


def test_stopping_a_session_from_a_different_thread_ends_its_cell(start: Start) -> None:
    """At once, with an error that says so; nothing of the session is left."""
    before = folders()
    session = start(2)
    stopper = threading.Timer(0.7, session.stop)
    stopper.start()
    began_s = time.monotonic()
    with pytest.raises(LaunchError, match="the session was stopped while it ran"):
        session.execute("import time; time.sleep(60)")
    assert time.monotonic() - began_s < 30
    stopper.join()
    assert not session.is_running
    assert folders() == before


def test_two_sessions_at_once_do_not_see_each_other(start: Start) -> None:
    """Each with its ranks, its group and its variables."""
    first, second = start(2), start(3)
    first.execute("name = 'first'; group.barrier()")
    second.execute("group.barrier()")
    assert second.pull("('name' in globals(), world_size)") == [(False, 3)] * 3
    second.stop()
    first.execute("group.barrier()")
    assert first.pull("name") == ["first"] * 2


def test_stop_runs_exit_handlers_and_removes_the_folder(start: Start, tmp_path: Path) -> None:
    """Exit handlers run; the folder was readable by this user only."""
    before = folders()
    session = start(2)
    (name,) = folders() - before
    assert (Path(tempfile.gettempdir()) / name).stat().st_mode & 0o777 == 0o700
    session.execute(f"import atexit, pathlib\natexit.register(lambda: pathlib.Path('{tmp_path}', str(rank)).touch())")
    pids = session.pids()
    session.stop()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert folders() == before
    assert not any(map(psutil.pid_exists, pids.values()))


def test_a_session_that_is_garbage_collected_ends() -> None:
    """Re-running the cell that made it, for instance."""
    session = Session(2, view=Kept())
    pids = session.pids()
    del session
    gc.collect()
    wait_until(lambda: not any(map(psutil.pid_exists, pids.values())), limit_s=10)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"preload": ("no_such_module_at_all",)}, "no_such_module_at_all"),
        ({"apps": ("no_such_app",)}, "no_such_app"),
        ({"backend": "no_such_backend"}, "no_such_backend"),
    ],
)
def test_a_start_that_fails_leaves_nothing_behind(options: dict[str, object], found: str) -> None:
    """No process, no folder, and a message that names what was wrong."""
    before = folders()
    with pytest.raises(LaunchError, match=found):
        Session(2, view=Kept(), **options)  # type: ignore[arg-type]
    assert folders() == before


def test_a_long_temporary_directory_does_not_matter(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Unix socket's path has 107 characters at most."""
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    session = start(2)
    session.execute("group.barrier()")
    assert session.pull("world_size") == [2, 2]


OPEN_AT_EXIT = """
import os
from ddpilot import Session
session = Session(2)
session.execute("import os; print('pid', os.getpid()); group.barrier()")
"""


def test_a_session_left_open_at_exit_ends_with_the_script(tmp_path: Path) -> None:
    """Quietly, and at once."""
    outcome = run_script(OPEN_AT_EXIT, tmp_path)
    pids = [int(line.split()[-1]) for line in outcome.out.splitlines() if "pid" in line]
    assert len(pids) == 2
    assert not any(map(is_alive, pids))
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_death_of_the_parent_is_the_end_of_its_ranks(tmp_path: Path, number: int) -> None:
    """A kernel that is killed or restarted takes them along, in the middle of a cell."""
    source = OPEN_AT_EXIT + "session.execute(\"print('busy', flush=True)\\nwhile True: pass\")\n"
    with running(source, tmp_path) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        pids = [int(line.split()[-1]) for line in lines if "pid" in line]
        assert len(pids) == 2, lines
        os.kill(process.pid, number)
        wait_until(lambda: not any(map(is_alive, pids)), limit_s=10)


def test_many_ranks_start(start: Start) -> None:
    """16 on this machine, and they meet."""
    session = start(16)
    session.execute("import torch; total = torch.ones(1); group.all_reduce(total)")
    assert session.pull("total.item()") == [16.0] * 16


def test_a_rank_starts_no_session_of_its_own(start: Start) -> None:
    """Each would start as many ranks again."""
    session = start(1)
    with pytest.raises(RankError, match="this code already runs on a rank of a session"):
        session.execute("from ddpilot import Session\nSession(2)")
    session.execute("%load_ext ddpilot")
    with pytest.raises(RankError, match=r"start ranks in the notebook \(`%%ddp --local`\)"):
        session.execute("%ddp start -n 2")


def test_a_stop_of_the_stop_ends_the_ranks_and_says_so(start: Start) -> None:
    """Exit handlers that take long are cut short; nothing is left."""
    session = start(2)
    session.execute("import atexit, time; atexit.register(time.sleep, 30)")
    pids = list(session.pids().values())
    with pytest.raises(LaunchInterrupted, match="the stop was interrupted: the ranks were killed"), pressing_stop(0.4):
        session.stop()
    assert not session.is_running
    assert not any(map(psutil.pid_exists, pids))
