# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are saved, found again, kept and chosen; what fails on the disk is told and ends nothing."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ddpilot.checkpoint.atomic_files import call_in_background
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.manifest import RunProgress
from ddpilot.errors import CheckpointError, CorruptCheckpointError


def save(directory: CheckpointDir, step: int, **kwargs: Any) -> None:
    """One small checkpoint, whose weight is its step, on the disk."""
    weights = {"model": {"w": torch.full((3,), float(step))}}
    directory.save(RunProgress(step=step), weights=weights, **kwargs)
    assert directory.wait()


def steps(directory: CheckpointDir) -> list[int]:
    """The steps of all checkpoints there, oldest first."""
    return [int(name.split("-")[-1]) for name in reversed(directory.names())]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let a file of this process grow further; where it may, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_save_gives_back_everything_when_it_is_loaded(tmp_path: Path) -> None:
    """Weights of several models, state dicts, parts, metrics and progress come back as they were."""
    model = torch.nn.Linear(3, 2)
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3), "exp_avg_sq": torch.randn(2, 3)}
    optimizer = {"state": {0: moments}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}]}
    progress = RunProgress(step=7, epoch=1, batch=3, samples_seen=99, seed=5, world_size=2, dataset_length=33)
    with CheckpointDir(tmp_path / "new" / "folder") as directory:
        directory.check_writable()
        directory.save(
            progress,
            weights={"model": model.state_dict(), "ema": {"module._orig_mod.w": torch.ones(2, dtype=torch.bfloat16)}},
            state={"optimizer": optimizer, "n": 3},
            parts=[{"x": 0}, {"x": torch.ones(1)}],
            metrics={"acc": 0.5},
        )
    found = directory.latest()
    assert found is not None
    assert found.manifest.progress == progress
    assert found.manifest.metrics == {"acc": 0.5}
    assert found.manifest.versions["torch"] == version("torch")
    torch.testing.assert_close(found.weights(), dict(model.state_dict()), rtol=0, atol=0)
    assert found.weights("ema")["w"].dtype == torch.bfloat16
    torch.testing.assert_close(found.state()["optimizer"], optimizer, rtol=0, atol=0)
    assert [found.part(rank) for rank in range(3)] == [{"x": 0}, {"x": torch.ones(1)}, None]
    with pytest.raises(CheckpointError, match="it has weights for 'model', 'ema'"):
        found.weights("critic")


def test_save_keeps_what_was_when_training_goes_on(tmp_path: Path) -> None:
    """What is written is the copy of the moment of `save`, although the weights change right after it."""
    weights = torch.zeros(2_000_000)
    with CheckpointDir(tmp_path) as directory:
        directory.save(RunProgress(step=1), weights={"model": {"w": weights}})
        weights.fill_(1)
        directory.wait()
        found = directory.latest()
        assert found is not None
        assert not found.weights()["w"].any()


def test_latest_is_none_when_there_is_nothing(tmp_path: Path) -> None:
    """A new run begins without a checkpoint, whether its directory is there or not."""
    assert CheckpointDir(tmp_path).latest() is None
    assert CheckpointDir(tmp_path / "missing").latest() is None
    assert CheckpointDir(tmp_path).best() is None


def test_keep_and_best_choose_what_stays(tmp_path: Path) -> None:
    """The newest `keep` and the best stay; NaN, a tie and a missing metric are not better; also after a restart."""
    accuracies = [0.5, 0.9, float("nan"), 0.9, 0.1]
    with CheckpointDir(tmp_path, keep=2, best="max acc") as directory:
        for step, accuracy in enumerate(accuracies):
            save(directory, step, metrics={"acc": accuracy})
    assert steps(directory) == [1, 3, 4]
    with CheckpointDir(tmp_path, keep=1, best="max acc") as again:
        save(again, 5)
        best = again.best()
        assert best is not None
        assert best.manifest.progress.step == 1
        assert steps(again) == [1, 5]
        save(again, 6, metrics={"acc": 0.95})
        assert steps(again) == [6]
    with CheckpointDir(tmp_path, best="min acc") as lowest:
        save(lowest, 7, metrics={"acc": 0.3})
        best = lowest.best()
        assert best is not None
        assert best.manifest.progress.step == 7


def test_save_never_replaces_one_of_the_same_step(tmp_path: Path) -> None:
    """A run that went back saves the same step again, under a name of its own, and that is the latest."""
    with CheckpointDir(tmp_path) as directory:
        for _ in range(2):
            save(directory, 3)
    assert len(directory.names()) == 2
    assert (tmp_path / "latest").read_text().strip() == directory.names()[0]


@pytest.mark.parametrize("arguments", [{"keep": 0}, {"best": "highest acc"}])
def test_checkpoint_dir_refuses_what_it_cannot_keep(tmp_path: Path, arguments: Any) -> None:
    """A `keep` below one and a `best` without a direction are named."""
    with pytest.raises(CheckpointError, match=f"`{next(iter(arguments))}` is "):
        CheckpointDir(tmp_path, **arguments)


def test_save_tells_every_time_when_there_is_no_room(tmp_path: Path) -> None:
    """Training goes on, the last good one stays, nothing half written is left; with room again, it saves again."""
    told: list[str] = []
    with CheckpointDir(tmp_path, report=told.append) as directory:
        save(directory, 1)
        before = sorted(tmp_path.iterdir())
        for step in (2, 3):
            with files_of_at_most(1_000_000):
                directory.save(RunProgress(step=step), weights={"model": {"w": torch.ones(500_000)}})
                assert not directory.wait()
        assert len(told) == 2
        assert (
            "File too large: 'model.safetensors'. Training continues; the last good checkpoint is save-000001"
            in told[1]
        )
        assert sorted(tmp_path.iterdir()) == before
        save(directory, 4)
        assert len(told) == 2
        with files_of_at_most(1_000_000):  # where torch.save writes: it shows only its own consequence of it
            directory.save(RunProgress(step=5), weights={}, state={"optimizer": {"m": torch.ones(500_000)}})
            assert not directory.close()
    assert "File too large: 'state.pt'" in told[2]
    assert len(told) == 3
    assert steps(directory) == [1, 4]


def test_failure_is_told_at_the_next_save_or_look(tmp_path: Path) -> None:
    """`poll` says nothing while all is well, and `save` tells of the one before it once."""
    told: list[str] = []
    directory = CheckpointDir(tmp_path / "checkpoints", report=told.append)
    (tmp_path / "checkpoints").write_text("in the way")
    directory.poll()
    weights = {"model": {"w": torch.ones(1)}}
    directory.save(RunProgress(step=1), weights=weights)
    directory.save(RunProgress(step=2), weights=weights)
    assert [("File exists" in text, "there is no earlier one" in text) for text in told] == [(True, True)]
    assert not directory.wait()
    (tmp_path / "checkpoints").unlink()
    directory.save(RunProgress(step=3), weights=weights)
    assert directory.close()
    directory.poll()
    assert len(told) == 2


def test_background_failure_is_raised_when_it_is_not_the_disks(tmp_path: Path) -> None:
    """A mistake in the writing is no full disk: it surfaces as an error, with its cause, at the next call."""
    directory = CheckpointDir(tmp_path)
    nothing: dict[str, None] = {}
    directory._future = call_in_background(lambda: nothing["mistake"])
    with pytest.raises(CheckpointError, match="saving a checkpoint: KeyError: 'mistake'") as caught:
        directory.save(RunProgress(step=2), weights={})
    assert isinstance(caught.value.__cause__, KeyError)
    assert directory.close() is False


def test_save_tells_when_there_is_no_memory_for_the_copy(tmp_path: Path) -> None:
    """Training goes on, also where the memory was to be had beforehand."""
    told: list[str] = []
    directory = CheckpointDir(tmp_path, report=told.append)
    directory.reserve(1 << 60)
    assert directory.wait()
    directory.save(RunProgress(step=1), weights={"model": {"w": torch.empty(1).expand(1 << 58)}})
    assert not directory.wait()
    assert [text.split(":")[0].split(",")[0] for text in told] == [
        "no memory for the copies of checkpoints",
        f"no checkpoint was written in {tmp_path}",
    ]
    assert "no memory for its copy ([Errno 12] Cannot allocate memory). Training continues" in told[1]
    save(directory, 2)


def test_check_writable_refuses_when_a_file_is_in_the_way(tmp_path: Path) -> None:
    """The path of the directory is named before training starts."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"writing in .*file/checkpoints: Not a directory"):
        CheckpointDir(tmp_path / "file" / "checkpoints").check_writable()


HOLD = "import sys; from pathlib import Path; from ddpilot.checkpoint.write_lock import Writer; "
HOLD += "held = Writer.of(Path(sys.argv[1])); print(held is not None, flush=True); sys.stdin.read()"


def test_one_process_writes_in_a_directory(tmp_path: Path) -> None:
    """Another one is refused before training and when it saves, until the first has ended; this one may come again."""
    weights = {"model": {"w": torch.ones(1)}}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    directory = CheckpointDir(tmp_path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        said = f"a different job writes its checkpoints there: process {other.pid} on {socket.gethostname()}. Choose a"
        with pytest.raises(CheckpointError, match=said):
            directory.check_writable()
        with pytest.raises(CheckpointError, match=said):
            directory.save(RunProgress(step=1), weights=weights)
        other.kill()
    directory.check_writable()
    with CheckpointDir(tmp_path) as second:
        second.check_writable()
    assert subprocess.run(command, input="", capture_output=True, text=True, check=False).returncode == 1
    directory.close()
    assert subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout == "True\n"


SAVE = """
import sys
from pathlib import Path
import torch
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.format import RunProgress
directory = CheckpointDir(sys.argv[1])
directory.check_writable()
print("locked", flush=True)
sys.stdin.readline()
directory.save(RunProgress(step=1), weights={"model": {"w": torch.ones(1)}})
"""


@contextmanager
def saving(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has taken the lock of `folder`, and saves there once it has read a line."""
    with subprocess.Popen(
        [sys.executable, "-c", SAVE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process


@pytest.mark.parametrize(("job_id", "is_taken_over"), [("7", True), ("8", False)])
def test_a_requeued_job_takes_the_directory_over_from_its_earlier_start_on_a_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_id: str, is_taken_over: bool
) -> None:
    """The earlier start lives on where Slurm cannot reach it, and is refused when it saves again; no other job is."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    notes: list[str] = []
    directory = CheckpointDir(tmp_path, report=notes.append)
    with saving(tmp_path) as earlier:
        monkeypatch.setenv("SLURM_JOB_ID", job_id)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        if is_taken_over:
            directory.check_writable()
        else:
            with pytest.raises(CheckpointError, match=rf"process {earlier.pid} on .* \(job 7, start 0\)"):
                directory.check_writable()
        _, stderr = earlier.communicate("\n", timeout=60)
    assert ("a different job writes its checkpoints there" in stderr) == is_taken_over
    assert len(notes) == is_taken_over
    if is_taken_over:
        assert f"process {earlier.pid} on {socket.gethostname()} (job 7, start 0) still holds" in notes[0]
        directory.save(RunProgress(step=2), weights={"model": {"w": torch.ones(1)}})
    directory.close()


def test_tasks_of_an_array_are_told_that_each_needs_its_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same time it is refused; later it is reported, since tasks one after the other may be one training."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    with saving(tmp_path) as first:
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
        own = r"Give each task of the array its own: such as f\"ckpt/\{os\.environ\['SLURM_ARRAY_TASK_ID'\]\}\""
        with CheckpointDir(tmp_path) as directory, pytest.raises(CheckpointError, match=own):
            directory.check_writable()
        first.communicate("\n", timeout=60)
    notes: list[str] = []
    with CheckpointDir(tmp_path, report=notes.append) as directory:
        directory.check_writable()
    with CheckpointDir(tmp_path, report=notes.append) as directory:
        directory.check_writable()
    assert len(notes) == 1
    assert f"the checkpoints in {tmp_path} are of array task 0: if each task is a training of its own" in notes[0]


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_lock_file_that_is_not_a_file_is_refused(kind: str, tmp_path: Path) -> None:
    """Another user of a shared directory may have made it; nothing is written through a symbolic link."""
    folder, victim = tmp_path / "run", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("kept")
    if kind == "link":
        (folder / ".writer").symlink_to(victim)
    else:
        os.mkfifo(folder / ".writer")
    what = "a symbolic link" if kind == "link" else "not a regular file"
    with (
        CheckpointDir(folder) as directory,
        pytest.raises(CheckpointError, match=rf"\.writer is {what}.*Remove it, or"),
    ):
        directory.check_writable()
    assert victim.read_text() == "kept"


def test_a_directory_that_was_deleted_is_made_and_locked_again(tmp_path: Path) -> None:
    """The next save says what is gone, once, and no other process may write there; the same for the lock's file."""
    told: list[str] = []
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with CheckpointDir(folder, report=told.append) as directory:
        directory.check_writable()
        save(directory, 1)
        shutil.rmtree(folder)
        save(directory, 2)
        save(directory, 3)
        (folder / ".writer").unlink()
        save(directory, 4)
        assert subprocess.run(command, input="", capture_output=True, check=False).returncode == 1
    assert steps(directory) == [2, 3, 4]
    what = "was deleted or moved while this job saves there"
    assert told == [
        f"{folder}, or everything in it, {what}: no checkpoint is left. Training and saving continue",
        f"the file `.writer` in {folder} {what}: 2 checkpoints are left. Training and saving continue",
    ]


def test_a_damaged_pointer_next_to_checkpoints_is_moved_aside(tmp_path: Path) -> None:
    """It is told by name, and the newest that is whole is gone on with; without checkpoints it is somebody else's."""
    for number, damage in enumerate((b"", b"\xff\xfe", None)):
        told: list[str] = []
        folder = tmp_path / str(number)
        with CheckpointDir(folder, best="min loss", report=told.append) as directory:
            save(directory, 1, metrics={"loss": 1.0})
            for pointer in ("latest", "best"):
                (folder / pointer).unlink()
                (folder / pointer).mkdir() if damage is None else (folder / pointer).write_bytes(damage)
            directory.check_writable()
            assert [text.partition(" in ")[0] for text in told] == ["`latest`", "`best`"]
            assert (
                "is damaged (it does not name a checkpoint) and was renamed to latest-damaged-1; the checkpoints"
                in told[0]
            )
            found = directory.latest()
            assert found is not None
            save(directory, 2, metrics={"loss": 2.0})
            assert len(told) == 2
    (tmp_path / "latest").write_text("")
    with pytest.raises(CheckpointError, match=r"a `latest` of a different program.* or remove that file"):
        CheckpointDir(tmp_path).check_writable()


def test_save_tells_when_torch_has_no_memory_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory and torch's allocator raise RuntimeError; training continues as with the kernel's OSError."""
    told: list[str] = []
    directory = CheckpointDir(tmp_path, report=told.append)
    for error in (RuntimeError("CUDA error: out of memory\nMore"), MemoryError()):
        monkeypatch.setattr(directory._host_copy, "take", Mock(side_effect=error))
        directory.save(RunProgress(step=1), weights={})
        assert not directory.wait()
    assert "no memory for its copy ([Errno 12] Cannot allocate memory (CUDA error: out of memory)). Trai" in told[0]
    assert "no memory for its copy ([Errno 12] Cannot allocate memory (MemoryError)). Training" in told[1]
    monkeypatch.setattr(directory._host_copy, "take", Mock(side_effect=RuntimeError("another mistake")))
    with pytest.raises(RuntimeError, match="another mistake"):
        directory.save(RunProgress(step=1), weights={})


def test_save_refuses_what_cannot_be_saved(tmp_path: Path) -> None:
    """Parts of too few ranks, weights that are no tensors, a name that is no file's: named, and nothing is written."""
    directory = CheckpointDir(tmp_path)
    with pytest.raises(CheckpointError, match="1 parts for 2 ranks"):
        directory.save(RunProgress(step=1, world_size=2), weights={}, parts=[{}])
    with pytest.raises(CheckpointError, match="'_extra_state' is a dict, not a tensor"):
        directory.save(RunProgress(step=1), weights={"model": {"_extra_state": {}}})  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=r"weights '\.\./x'"):
        directory.save(RunProgress(step=1), weights={"../x": {}})
    with pytest.raises(CheckpointError, match=r"\['state'\]\['sched'\]\['fn'\] is a builtins.function"):
        directory.save(RunProgress(step=1), weights={}, state={"sched": {"fn": lambda: 1}})
    assert directory.close()
    assert directory.names() == []


def test_abandoned_saves_are_cleared_away_and_live_ones_are_not(tmp_path: Path) -> None:
    """What a killed process left half written goes with the next save; what another is writing stays."""
    (tmp_path / ".writing-save-000001-step-1-abcdef01").mkdir()
    (tmp_path / ".deleting-save-000000-step-0").mkdir()
    (tmp_path / ".abcdef01.new").mkdir()
    (tmp_path / ".latest.abcdef01.new").write_text("")
    from ddpilot.checkpoint.atomic_files import staging

    with staging(tmp_path, ".writing-save-000001-step-2-") as live, CheckpointDir(tmp_path) as directory:
        save(directory, 3)
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [live.name, "save-000001-step-3"]
        assert not (tmp_path / ".latest.abcdef01.new").exists()


def test_save_keeps_files_and_directories_of_the_user(tmp_path: Path) -> None:
    """Also with names that begin or end like those of unfinished saves."""
    mine = {".deleting-save-old", ".writing-save-2024-results", ".config.new", ".results.new"}
    for name in mine:
        (tmp_path / name).mkdir()
    (tmp_path / ".notes.new").write_text("")
    with CheckpointDir(tmp_path) as directory:
        save(directory, 1)
    assert mine | {".notes.new"} <= {*os.listdir(tmp_path)}


def test_files_have_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    """Checkpoints can be read by whom the user lets read files."""
    with CheckpointDir(tmp_path) as directory:
        save(directory, 1)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").write_text("")
    found = tmp_path / directory.names()[0]
    assert stat.S_IMODE(found.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    for path in (found / "manifest.json", found / "model.safetensors", tmp_path / "latest"):
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain" / "file").stat().st_mode)


def test_latest_tells_when_its_pointer_leads_nowhere(tmp_path: Path) -> None:
    """The newest that is there is used instead, and that is said; with none, it is an error and no new beginning."""
    told: list[str] = []
    with CheckpointDir(tmp_path, report=told.append) as directory:
        save(directory, 1)
        (tmp_path / "latest").write_text("save-000009-step-9\n")
        found = directory.latest()
        assert found is not None
        assert found.manifest.progress.step == 1
        assert "names 'save-000009-step-9', which does not exist" in told[0]
    found.path.rename(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="the checkpoint in `latest` does not exist"):
        directory.latest()
