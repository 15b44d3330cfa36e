# SPDX-License-Identifier: Apache-2.0
"""Folders of jobs: made, listed, closed, and removed when there are too many."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
import uuid
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ddpilot.cli.watch_command import render_jobs
from ddpilot.errors import DdpilotError
from ddpilot.record.hook import ring_path
from ddpilot.watch.job_folder import (
    JOBS_VARIABLE,
    close_job,
    jobs_root,
    list_jobs,
    make_job_folder,
    read_job_info,
    remove_old,
    write_job_info,
)
from ddpilot.watch.past_jobs import explain_job, find_job
from tests.unit.record.rings import ABOUT, open_ring


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test's jobs have their folders."""
    monkeypatch.setenv(JOBS_VARIABLE, str(tmp_path / "jobs"))
    return tmp_path / "jobs"


def test_make_job_folder_is_for_this_user_alone_and_listed_as_running(root: Path) -> None:
    """Of the process that made it."""
    folder, about = make_job_folder("train", 4, (2, 3))
    assert folder.parent == root
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(root.stat().st_mode) == 0o700
    assert read_job_info(folder) == about
    assert about.is_running
    assert list_jobs() == [(folder, about)]
    assert (about.world_size, about.ranks) == (4, (2, 3))


def test_close_job_removes_what_ended_well_and_marks_what_did_not(root: Path) -> None:
    """A notebook lives on when its job has ended."""
    good, bad = make_job_folder("good", 2), make_job_folder("bad", 2)
    close_job(*good, is_clean=True)
    close_job(*bad, is_clean=False)
    ((folder, about),) = list_jobs()
    assert (folder, about.is_running) == (bad[0], False)


def test_remove_old_keeps_the_newest_and_those_that_run(root: Path) -> None:
    """However many there are."""
    running, _ = make_job_folder("running", 1)
    made = [make_job_folder(f"job{number}", 1) for number in range(4)]
    for number, (folder, about) in enumerate(made):
        write_job_info(folder, replace(about, ended_s=1.0, started_s=about.started_s + number))
    remove_old(root, num_kept=2)
    assert {about.name for _, about in list_jobs()} == {"running", "job2", "job3"}
    assert running.exists()


def test_remove_old_keeps_a_folder_that_the_user_has_renamed(root: Path) -> None:
    """It is kept for what is in it."""
    folder, about = make_job_folder("train", 1)
    write_job_info(folder, replace(about, ended_s=1.0))
    kept = folder.rename(root / "the-hang-of-monday")
    remove_old(root, num_kept=0)
    assert kept.exists()


def test_a_job_of_another_machine_is_listed_with_its_name_and_ended_when_it_said_so(root: Path) -> None:
    """Its processes cannot be seen, and those with the same numbers here are not taken for them."""
    folder, about = make_job_folder("train", 1)
    write_job_info(folder, replace(about, host="elsewhere"))
    ring = open_ring(ring_path(folder, 0), publish=False)
    ring.publish({**ABOUT, "rank": 0, "pid": os.getpid(), "host": "elsewhere"})
    assert "elsewhere" in render_jobs(list_jobs())
    report = str(explain_job(*find_job(str(folder))))
    assert "only that machine shows" in report
    assert "running since" not in report
    write_job_info(folder, replace(about, host="elsewhere", ended_s=2.0))
    assert "DDP209" in str(explain_job(*find_job(str(folder))))
    ring.close(1)


def test_remove_old_removes_folders_that_no_job_can_be_read_from(root: Path) -> None:
    """Such as of an observer that was killed at its start; not what ddpilot has not made, and not what is new."""
    hour_ago = time.time() - 4000
    lost, fresh, foreign, other = (
        root / name for name in ("0101-000000-abcd", "0101-000001-abcd", "0102-000000-abcd", "x")
    )
    for folder, file in ((lost, "rank0.ring"), (fresh, "rank0.ring"), (foreign, "thesis.txt"), (other, "job.json")):
        folder.mkdir(parents=True, mode=0o700)
        (folder / file).write_text("")
        if folder != fresh:
            os.utime(folder / file, (hour_ago, hour_ago))
            os.utime(folder, (hour_ago, hour_ago))
    root.chmod(0o700)
    remove_old(root)
    assert {path.name for path in root.iterdir()} == {fresh.name, foreign.name, other.name}


def test_jobs_of_one_second_that_draw_the_same_number_have_different_folders(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one draws again."""
    numbers = iter([uuid.UUID(int=1 << 112), uuid.UUID(int=1 << 112), uuid.UUID(int=2 << 112)])
    monkeypatch.setattr("uuid.uuid4", lambda: next(numbers))
    monkeypatch.setattr("time.strftime", lambda _form: "1127-235657")
    assert [make_job_folder("job", 1)[0].name for _ in range(2)] == ["1127-235657-0001", "1127-235657-0002"]


@pytest.mark.parametrize(
    "damage",
    [
        {"started_s": None},
        {"started_s": 1e300},
        {"world_size": "x"},
        {"world_size": 10**9},
        {"ranks": ["a"]},
        {"ranks": [7]},
        {"pid": -1},
        {"pid": "x"},
        {"pid_started_s": None},
        {"command": [1, None]},
        {"name": None},
    ],
)
def test_a_job_with_a_damaged_field_is_refused_and_stops_no_other(root: Path, damage: dict[str, object]) -> None:
    """The list leaves it out, the next launch makes its folder, and asking for it says which field it is."""
    folder, _ = make_job_folder("damaged", 2)
    (folder / "job.json").write_text(json.dumps(json.loads((folder / "job.json").read_text()) | damage))
    _, about = make_job_folder("sound", 1)
    assert [each.name for _, each in list_jobs(root)] == [about.name]
    with pytest.raises(DdpilotError, match=rf"`({next(iter(damage))}|world_size)` is"):
        read_job_info(folder)


def test_a_shared_folder_of_jobs_has_one_of_this_user_in_it(root: Path) -> None:
    """Where others may write, their folders lie apart."""
    root.mkdir()
    root.chmod(0o1777)
    folder, _ = make_job_folder("train", 1)
    assert folder.parent.parent == root
    assert folder.parent.name == f"ddpilot-{os.geteuid()}"


def test_files_of_a_job_are_for_this_user_alone_whatever_the_umask() -> None:
    """Also with a umask of 0."""
    before = os.umask(0)
    try:
        folder, _ = make_job_folder("train", 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "job.json").stat().st_mode) == 0o600


def test_names_of_jobs_are_listed_without_their_terminal_commands(root: Path) -> None:
    """A name is what the command line said."""
    folder, about = make_job_folder("train\x1b]0;owned\x07", 1)
    write_job_info(folder, replace(about, command=("x\x1b[2J",)))
    assert "\x1b" not in render_jobs(list_jobs())
    assert "\x1b" not in str(explain_job(*find_job(about.id)))


def test_jobs_root_is_the_users_own_where_none_is_named() -> None:
    """In the temporary directory."""
    assert jobs_root({}).name.startswith("ddpilot-")


def test_make_job_folder_refuses_a_place_that_is_no_folder(root: Path) -> None:
    """As it does one of another user."""
    root.write_text("")
    with pytest.raises(OSError, match="jobs"):
        make_job_folder("train", 1)


def test_find_job_takes_an_id_its_end_a_process_and_a_folder(root: Path) -> None:
    """And says which jobs there are where none is meant."""
    folder, about = make_job_folder("train", 1)
    for word in (about.id, about.id[:-2], about.id[-4:], str(about.pid), str(folder)):
        assert find_job(word) == (folder, about)
    with pytest.raises(DdpilotError, match=rf"looking for the job 'other': 0 of the 1 jobs .*{about.id}"):
        find_job("other")


def test_find_job_refuses_the_first_digits_of_any_id_and_what_begins_several(root: Path) -> None:
    """As git does with a short id: "1" was the only job there is, of any day from October on, and pid 1 of any job."""
    _, about = make_job_folder("train", 1)
    for word in ("0", "1", about.id[:3]):
        with pytest.raises(DdpilotError, match=rf"0 of the 1 jobs .* match. Give the id of one \({about.id}\)"):
            find_job(word)
    again = replace(about, id=f"{about.id[:4]}-000000-abcd")
    (root / again.id).mkdir(mode=0o700)
    write_job_info(root / again.id, again)
    with pytest.raises(DdpilotError, match=rf"2 of the 2 jobs .*{about.id}"):
        find_job(about.id[:4])


def test_find_job_says_that_there_are_no_jobs(root: Path) -> None:
    """In place of a choice among none."""
    with pytest.raises(DdpilotError, match=r"looking for the job 'other': no jobs in .*Jobs that ended well"):
        find_job("other")


def test_find_job_takes_any_process_of_a_job(root: Path) -> None:
    """What observes it, what one of its processes has started, and what has started it; not a process beside it."""
    folder, about = make_job_folder("train", 1)
    with subprocess.Popen(["sh", "-c", "sleep 60 >&- & echo $!; wait"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = psutil.Process(int(child.stdout.readline()))
        try:
            write_job_info(folder, replace(about, pid=child.pid, pid_started_s=psutil.Process(child.pid).create_time()))
            write_ring(ring_path(folder, 0), child.pid)
            for pid in (child.pid, grandchild.pid, os.getpid()):
                assert find_job(str(pid))[0] == folder
            with subprocess.Popen(["sleep", "60"]) as other:
                with pytest.raises(DdpilotError, match="0 of the 1 jobs"):
                    find_job(str(other.pid))
                other.kill()
        finally:
            grandchild.kill()
            child.kill()


def write_ring(path: Path, pid: int) -> None:
    """The ring of a rank with the process `pid`."""
    ring = open_ring(path, publish=False)
    ring.publish({**ABOUT, "pid": pid})
    ring.close(1)


def test_find_job_takes_a_number_for_a_job_although_a_folder_has_that_name(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in the working directory that is no job's; with a separator a folder is meant."""
    folder, about = make_job_folder("train", 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / str(about.pid)).mkdir()
    assert find_job(str(about.pid)) == (folder, about)
    with pytest.raises(DdpilotError, match="reading the job in"):
        find_job(f"./{about.pid}")


def test_remove_old_keeps_jobs_of_other_machines_that_have_not_said_that_they_ended(root: Path) -> None:
    """Where machines share the folder nobody here can look at their processes; after a month they are over."""
    made = [make_job_folder(f"job{number}", 1) for number in range(4)]
    for number, (folder, about) in enumerate(made):
        elsewhere = replace(about, host="another", ended_s=1.0 if number == 1 else None)
        write_job_info(
            folder, replace(elsewhere, started_s=about.started_s - (40 * 24 * 3600 if number == 2 else number))
        )
    remove_old(root, num_kept=0)
    assert {about.name for _, about in list_jobs()} == {"job0", "job3"}
