# SPDX-License-Identifier: Apache-2.0
"""Two unprivileged users of one machine: what one has put where the other's files are to be is not touched."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ddpilot.cli.watch_command import watch_job
from ddpilot.environments.private_files import make_own_folder, own_temporary_folder
from ddpilot.errors import DdpilotError
from ddpilot.integrations.fastai.learners import one_at_a_time
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.main_thread import WATCH_SIGNAL, is_answering
from ddpilot.watch.job_folder import JOBS_VARIABLE, jobs_root, list_jobs, make_job_folder
from ddpilot.watch.snapshot.files import take_stacks

ATTACKER, VICTIM = 54242, 54343

pytestmark = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act as two other users"
)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory that both users write to, as /tmp is."""
    folder = Path("/tmp") / f"ddpilot-two-users-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv(JOBS_VARIABLE)
    yield folder
    subprocess.run(["rm", "-r", str(folder)], check=True)


def as_user(uid: int, act: Callable[[], object]) -> None:
    """Call `act` in a process of the user `uid`; fails the test with what it raises."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            act()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - shown by the test's own process
            os.write(write, traceback.format_exc().encode())
            os._exit(1)
    os.close(write)
    with open(read) as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, text


def plant_job(root: Path, pid: int, precious: Path) -> None:
    """As the attacker: a job in the victim's place, whose process answers, with links to a file of the victim's."""
    folder = root / "0101-000000-abcd"
    folder.mkdir(parents=True)
    root.chmod(0o755)
    folder.chmod(0o755)
    about = {
        "id": folder.name,
        "name": "train\x1b]0;owned\x07",
        "command": ["x\x1b[2J"],
        "world_size": 1,
        "host": os.uname().nodename,
        "pid": pid,
        "pid_started_s": psutil.Process(pid).create_time(),
        "started_s": 1e9,
        "ranks": [0],
        "ended_s": None,
    }
    (folder / "job.json").write_text(json.dumps(about))
    for name in ("rank0.stacks", "rank0.ask", "rank0.ring", "report.json", "report.txt"):
        (folder / name).symlink_to(precious)


def test_a_job_folder_of_another_user_is_neither_read_nor_written(
    shared: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor is its process signalled: not by the list, nor by name, nor where the job's own folder is asked for."""
    home = shared / "home"
    home.mkdir(mode=0o700)
    os.chown(home, VICTIM, VICTIM)
    precious, root = home / "precious.txt", shared / f"ddpilot-{VICTIM}"
    as_user(VICTIM, lambda: precious.write_text("precious"))
    digest = hashlib.blake2b(b"http://example.org/file", digest_size=8).hexdigest()

    def plant() -> None:
        plant_job(root, os.getppid(), precious)

    as_user(ATTACKER, plant)

    def act() -> None:
        assert jobs_root() == root
        assert list_jobs() == []
        for word in (None, "0101-000000-abcd", str(root / "0101-000000-abcd")):
            with pytest.raises(DdpilotError, match=f"belongs to the user {ATTACKER}, not to this one"):
                watch_job(word)
        assert take_stacks(root / "0101-000000-abcd", {0: os.getpid()}) == {}
        with pytest.raises(OSError, match="rank0.ring"):
            read_ring(root / "0101-000000-abcd" / "rank0.ring")
        with pytest.raises(PermissionError, match=f"belongs to the user {ATTACKER}.*{JOBS_VARIABLE}"):
            make_job_folder("train", 1)
        with one_at_a_time("http://example.org/file"):  # without a lock
            assert not (root / f"{digest}.lock").exists()
        assert precious.read_text() == "precious"

    as_user(VICTIM, act)
    shown = capfd.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "owned" not in shown.out


def test_a_shared_folder_of_jobs_holds_one_folder_for_each_user(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees its own jobs, and removes no others."""
    monkeypatch.setenv(JOBS_VARIABLE, str(shared))
    as_user(ATTACKER, lambda: make_job_folder("theirs", 1))

    def act() -> None:
        make_job_folder("mine", 1)
        assert [about.name for _, about in list_jobs()] == ["mine"]

    as_user(VICTIM, act)
    assert {path.name for path in shared.iterdir()} == {f"ddpilot-{ATTACKER}", f"ddpilot-{VICTIM}"}


def test_a_process_of_another_user_is_not_signalled() -> None:
    """Not even by root, and though it handles the signal."""
    code = f"""
        import os, signal, sys
        os.setgroups([]); os.setresgid({ATTACKER}, {ATTACKER}, {ATTACKER}); os.setresuid(*[{ATTACKER}] * 3)
        signal.signal({int(WATCH_SIGNAL)}, lambda *_: os._exit(1))
        print(flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-S", "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not is_answering(process.pid)
        as_user(VICTIM, lambda: (not is_answering(process.pid)) or os._exit(1))
        process.communicate(b"")
    assert process.returncode == 0


def test_an_own_folder_is_made_where_nobody_else_can_enter(shared: Path) -> None:
    """The one in the temporary directory."""

    def act() -> None:
        folder = make_own_folder(own_temporary_folder())
        assert folder == shared / f"ddpilot-{VICTIM}"
        (folder / "mine").write_text("")

    def peek() -> None:
        with pytest.raises(PermissionError):
            os.listdir(shared / f"ddpilot-{VICTIM}")

    as_user(VICTIM, act)
    as_user(ATTACKER, peek)
