# SPDX-License-Identifier: Apache-2.0
"""What `enable` takes, which processes it counts as one rank's, and what of theirs the observer counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ddpilot.errors import LaunchError
from ddpilot.guard import hook as guard_hook
from ddpilot.record.flight_ring.writer import RingWriter
from ddpilot.record.hook import ring_path
from ddpilot.watch.external import instrumentation
from ddpilot.watch.external.instrumentation import OWNER_VARIABLE, enable, enable_from_environment
from ddpilot.watch.external.observer_process import ObserverProcess
from ddpilot.watch.external.rank_process import RankProcess, error_path, find_rank_processes
from ddpilot.watch.job_folder import JOBS_VARIABLE, OBSERVER
from tests.unit.record.rings import ABOUT, open_ring

RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
SLEEP = "import sys; sys.stdin.read()"


def test_enable_refuses_a_function() -> None:
    """The observer is another process, and cannot call it: it would have meant "stop"."""
    with pytest.raises(LaunchError, match="reading `on_finding`: a function, .* `Launcher` takes a function"):
        enable(on_finding=print)  # type: ignore[arg-type]  # what is refused
    with pytest.raises(LaunchError, match='reading `on_finding`: \'end\'. Give "stop" or "report"$'):
        enable(on_finding="end")  # type: ignore[arg-type]  # what is refused


@pytest.mark.parametrize("word", ["1", "yes", "true", "ON"])
def test_watch_variable_takes_the_usual_words(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For DDPILOT_GUARD too."""
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(instrumentation, "enable", lambda **given: calls.append(given))
    enable_from_environment({"DDPILOT_WATCH": word, "DDPILOT_GUARD": "off", "DDPILOT_ON_FINDING": "report"})
    enable_from_environment({"DDPILOT_WATCH": "no"})
    enable_from_environment({})
    assert calls == [{"guard": False, "on_finding": "report"}]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DDPILOT_WATCH", "2", "reading DDPILOT_WATCH: DDPILOT_WATCH='2'. Set it to 1 or 0, or unset it"),
        ("DDPILOT_GUARD", "of", "reading DDPILOT_GUARD: DDPILOT_GUARD='of'. Set it to 1 or 0, or unset it"),
        ("DDPILOT_ON_FINDING", "repot", "reading DDPILOT_ON_FINDING: 'repot'. Set it to report or stop, or unset it"),
    ],
)
def test_variable_that_is_not_understood_is_reported_by_rank_0_alone(
    name: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its value is the same on every rank."""
    for rank in ("0", "1", "2"):
        enable_from_environment({**RANK, "RANK": rank, "DDPILOT_WATCH": "1", name: value})
    assert capsys.readouterr().err == f"ddpilot: this job is not watched: {said}\n"


def test_guard_variable_that_is_not_understood_is_reported_by_rank_0_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Guard stays on."""
    environ = {"DDPILOT_RING_DIR": "/nowhere/at/all", "DDPILOT_GUARD": "2"}
    assert all(guard_hook._is_on(SimpleNamespace(rank=rank, environ=environ)) for rank in (0, 1))
    said = (
        "ddpilot: rank 0: training is guarded: reading DDPILOT_GUARD: DDPILOT_GUARD='2'. Set it to 1 or 0, or unset it"
    )
    assert capsys.readouterr().err == f"{said}\n"


@pytest.mark.parametrize(("value", "imports"), [("1", True), ("yes", True), ("2", True), ("0", False), ("", False)])
def test_installed_line_starts_ddpilot_for_every_value_but_0(
    value: str, imports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a value that is not understood is reported."""
    line = next(text for text in Path("setup.py").read_text().splitlines() if text.startswith("LINE = "))
    names: dict[str, str] = {}
    exec(line, names)
    monkeypatch.setenv("DDPILOT_WATCH", value)
    imported: list[str] = []
    exec(names["LINE"], {"__builtins__": {"__import__": lambda name, *_: imported.append(name) if "." in name else os}})
    assert imported == ["ddpilot.watch.at_startup"] * imports


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process is rank 1 of two, on a node where no observer is started; torch is not looked at."""
    for name, text in {**RANK, "MASTER_ADDR": "127.0.0.1", JOBS_VARIABLE: str(tmp_path / "jobs")}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv(OWNER_VARIABLE, "")
    monkeypatch.setattr(instrumentation, "when_imported", lambda *_: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(instrumentation, "_enabled_pid", 0)
    return tmp_path / "jobs"


def test_enable_takes_a_path_as_the_name(rank: Path) -> None:
    """It is JSON in the end."""
    folder = enable(name=Path("x"))  # type: ignore[arg-type]  # a script's own path is at hand
    assert folder is not None
    assert find_rank_processes(folder)[1].job["name"] == "x"
    assert folder.parent == rank
    assert enable() is None  # it is watched already


def test_enable_says_in_one_line_that_no_observer_can_be_started(
    rank: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script goes on, and what it starts is not taken for a part of a watched rank."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert enable() is None
    assert "ddpilot: rank 0: this job is not watched: " in capsys.readouterr().err
    assert not os.environ[OWNER_VARIABLE]


def test_enable_leaves_the_error_of_an_earlier_process_behind(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that tries again has a rank without an error."""
    folder = enable()
    assert folder is not None
    error_path(folder, 1).write_text(json.dumps(["ValueError", "old", ""]))
    monkeypatch.setattr(instrumentation, "_enabled_pid", 0)
    monkeypatch.setenv(OWNER_VARIABLE, str(os.getpid()))  # as after an exec
    assert enable() == folder
    assert not error_path(folder, 1).exists()
    assert find_rank_processes(folder)[1].number == 1


def test_an_exception_of_a_forked_child_is_not_the_ranks(rank: Path) -> None:
    """The rank goes on."""
    folder = enable()
    assert folder is not None
    child = os.fork()
    if child == 0:
        sys.stderr = open(os.devnull, "w")
        sys.excepthook(ValueError, ValueError("of a child"), None)
        os._exit(0)
    os.waitpid(child, 0)
    assert not error_path(folder, 1).exists()


def origin_in(environ: dict[str, str], *, between: dict[str, str] | None = None) -> tuple[str, str]:
    """Which processes are launcher and shell of a Python with `environ`: "test", "between", "self", or "none".

    It is a child of this test's process, or, with `between`, of a Python with these variables, itself such a child.
    """
    code = (
        "import os, psutil; from ddpilot.watch.external.instrumentation import find_origin; "
        "found = find_origin(os.environ);"
        "print(os.getpid(), os.getppid(), *([found.launcher.pid, found.shell.pid] if found else []))"
    )
    command = [sys.executable, "-c", code]
    if between is not None:
        inner = f"import json, subprocess, sys; subprocess.run({command!r}, env=json.loads(sys.argv[1]), check=True)"
        command = [sys.executable, "-c", inner, json.dumps({**os.environ, **environ})]
    env = {**os.environ, **(environ if between is None else between)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    own, parent, *found = map(int, done.stdout.split())
    names = {os.getpid(): "test", parent: "between" if between is not None else "test", own: "self"}
    return tuple(names[pid] for pid in found) if found else ("none", "none")  # type: ignore[return-value]  # two


def test_find_origin_tells_shells_launchers_and_workers_apart() -> None:
    """By their variables: those of the rank, and those that a watched rank has for what it starts."""
    inner, watched = {**RANK, "MASTER_PORT": "29501"}, {OWNER_VARIABLE: str(os.getpid())}
    assert origin_in(RANK) == ("test", "self")
    assert origin_in(RANK, between=RANK) == ("test", "between")
    assert origin_in({**RANK, "MASTER_PORT": "29501"}, between=RANK) == ("test", "between")  # a shell that sets a port
    assert origin_in(RANK, between={}) == ("between", "self")
    # This test's process as a watched rank: its worker, a worker of that, and a rank of a job that it has launched.
    assert origin_in({**RANK, **watched}) == ("none", "none")
    assert origin_in({**RANK, **watched}, between={**RANK, **watched}) == ("none", "none")
    assert origin_in({**inner, **watched}, between={**RANK, **watched}) == ("between", "self")
    assert origin_in({**RANK, OWNER_VARIABLE: "999999999"}) == ("none", "none")


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    """Another process, which ends with the test."""
    with subprocess.Popen([sys.executable, "-S", "-c", SLEEP], stdin=subprocess.PIPE) as process:
        yield psutil.Process(process.pid)
        process.communicate(b"")


def rank_process(process: psutil.Process, *, shell: psutil.Process | None = None, number: int = 0) -> RankProcess:
    """The `number`-th process of a rank, of two on this node."""
    shell = shell or process
    return RankProcess(
        pid=process.pid,
        started_s=process.create_time(),
        shell_pid=shell.pid,
        shell_started_s=shell.create_time(),
        since_ns=time.monotonic_ns(),
        number=number,
        job={"local_rank": 0, "local_world_size": 2, "world_size": 2},
    )


def record(folder: Path, rank: int, pid: int) -> RingWriter:
    """The ring of `rank`, as the process `pid` makes it now."""
    ring = open_ring(ring_path(folder, rank))
    ring.publish({**ABOUT, "rank": rank, "pid": pid, "started_ns": time.monotonic_ns()})
    return ring


def test_the_observation_begins_again_for_a_late_rank_and_for_a_new_process(
    tmp_path: Path, sleeper: psutil.Process
) -> None:
    """Rings of processes that a rank has no more do not count."""
    observing = ObserverProcess(tmp_path)
    first = rank_process(psutil.Process())
    first.write(tmp_path, 0)
    rings = [record(tmp_path, 0, os.getpid())]
    observing._ranks = {0: first}
    assert not observing._has_changed()
    second = rank_process(sleeper)
    second.write(tmp_path, 1)
    assert not observing._has_changed()  # it does not record yet
    rings.append(record(tmp_path, 1, sleeper.pid))
    assert observing._has_changed()
    assert observing._await_ranks() == {0: first, 1: second}
    observing._ranks = {0: first, 1: second}
    (tmp_path / "rank1.process").unlink()  # as a cleaner of temporary files does after days
    assert not observing._has_changed()
    second.write(tmp_path, 1)
    again = replace(first, number=1, since_ns=time.monotonic_ns())
    again.write(tmp_path, 0)
    assert observing._has_changed()
    assert not observing._records(0, again, {0: again, 1: second})  # what lies there is of before
    rings.append(record(tmp_path, 0, os.getpid()))
    assert observing._await_ranks() == {0: again, 1: second}
    for ring in rings:
        ring.close(0)


def test_the_end_of_a_process_counts_when_its_shell_has_ended(tmp_path: Path, sleeper: psutil.Process) -> None:
    """Until then another may come, as after a failed download."""
    with subprocess.Popen([sys.executable, "-S", "-c", SLEEP], stdin=subprocess.PIPE) as gone:
        process = rank_process(psutil.Process(gone.pid), shell=sleeper)
    error_path(tmp_path, 0).write_text(json.dumps(["ValueError", "of the first", ""]))
    observing = ObserverProcess(tmp_path)
    observing._ranks = {0: process}
    facts = observing._facts()[0]
    assert (facts.is_away, facts.error, facts.process.state) == (True, None, "unknown")
    sleeper.kill()
    sleeper.wait()
    facts = observing._facts()[0]
    assert (facts.is_away, facts.process.state) == (False, "ended")
    assert facts.error is not None


def test_an_observer_goes_on_in_a_folder_that_is_gone_or_takes_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk is told in one line; of a deleted folder the rings say so."""
    observing = ObserverProcess(tmp_path / "gone")
    observing._ranks = {0: rank_process(psutil.Process())}
    observing._job = {"name": "train.py", "command": [], "world_size": 1}
    observing._write_job_info()
    assert "`ddpilot watch` does not list this job" in capsys.readouterr().err
    assert not observing._has_changed()


def test_a_second_observer_of_one_job_does_nothing(tmp_path: Path) -> None:
    """It leaves at once, and the folder stays."""
    import fcntl

    folder = tmp_path / "jobs" / "0101-000000-abcd"
    folder.mkdir(parents=True)
    with open(folder / OBSERVER, "w") as first:
        (folder / OBSERVER).chmod(0o600)
        fcntl.flock(first, fcntl.LOCK_EX)
        ObserverProcess(folder).run()
    assert folder.exists()
