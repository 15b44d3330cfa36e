# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at a URL, by fsspec's own file systems in memory and on disk: uploaded, listed, pruned, downloaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.manifest import RunProgress
from ddpilot.checkpoint.weights import load_weights
from ddpilot.errors import CheckpointError, CorruptCheckpointError


@pytest.fixture
def url() -> Iterator[str]:
    """A folder of its own in fsspec's file system in memory, empty afterwards."""
    name = uuid.uuid4().hex
    yield f"memory://{name}/run 7"
    for path in [path for path in MemoryFileSystem.store if path.startswith(f"/{name}/")]:
        del MemoryFileSystem.store[path]


class Told(list[str]):
    """The messages of a directory, in order."""

    def report(self, text: str) -> None:
        """Collect one."""
        self.append(text)


def open_at(url: str, staging: Path, told: Told | None = None, **options: Any) -> CheckpointDir:
    """The directory at `url`, whose copies are below `staging`; what it tells must be expected."""
    return CheckpointDir(url, staging_dir=staging, report=(Told() if told is None else told).report, **options)


def save(directory: CheckpointDir, *steps: int, **kwargs: Any) -> None:
    """Small checkpoints, whose weight is their step, written and uploaded."""
    for step in steps:
        weights = {"model": {"w": torch.full((3,), float(step))}}
        directory.save(RunProgress(step=step), weights=weights, **kwargs)
        assert directory.wait()


def steps(directory: CheckpointDir) -> list[int]:
    """The steps of all checkpoints at the URL, oldest first."""
    return [int(name.split("-")[-1]) for name in reversed(directory.names())]


def files(url: str) -> list[str]:
    """What is below the URL in memory."""
    root = url.removeprefix("memory:/").rstrip("/")
    return sorted(path.removeprefix(f"{root}/") for path in MemoryFileSystem.store if path.startswith(f"{root}/"))


def test_save_uploads_and_a_different_machine_downloads(url: str, tmp_path: Path) -> None:
    """What was saved at a URL is loaded from an empty local directory; one local copy is kept where it was written."""
    told = Told()
    with open_at(url, tmp_path / "a", told) as directory:
        directory.check_writable()
        assert directory.latest() is None
        save(directory, 3, 6, metrics={"acc": 0.5})
    assert told == []
    assert files(url) == [
        f"save-{name}/{file}"
        for name in ("000001-step-3", "000002-step-6")
        for file in ("manifest.json", "model.safetensors", "state.pt")
    ]
    assert [path.name for path in directory.path.iterdir() if path.name.startswith("save")] == ["save-000002-step-6"]
    found = open_at(url + "/", tmp_path / "b").latest()
    assert found is not None
    assert found.manifest.progress.step == 6
    assert found.path.is_relative_to(tmp_path / "b")
    assert found.weights()["w"].tolist() == [6.0] * 3


def test_keep_and_best_hold_at_the_url(url: str, tmp_path: Path) -> None:
    """The newest and the best stay; a run on a different machine knows the best of the one before it."""
    with open_at(url, tmp_path / "a", keep=2, best="max acc") as directory:
        directory.check_writable()
        for step, acc in ((1, 0.3), (2, 0.9), (3, 0.5), (4, 0.4)):
            save(directory, step, metrics={"acc": acc})
    assert steps(directory) == [2, 3, 4]
    with open_at(url, tmp_path / "b", keep=2, best="max acc") as other:
        other.check_writable()
        save(other, 5, 6, metrics={"acc": 0.8})
        assert other.names() == directory.names()
    assert other.names() == ["save-000006-step-6", "save-000005-step-5", "save-000002-step-2"]
    best = other.best()
    assert best is not None
    assert best.manifest.metrics == {"acc": 0.9}
    model = torch.nn.ParameterDict({"w": torch.zeros(3)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPILOT_STAGING_DIR", str(tmp_path / "c"))
        weights = {"/best": 2.0, "": 6.0, "/latest": 6.0, f"/{other.names()[1]}": 5.0}
        for path, weight in weights.items():
            load_weights(model, f"{url}{path}")
            assert model["w"].tolist() == [weight] * 3
        with pytest.raises(CheckpointError, match="there are no checkpoints"):
            load_weights(model, f"{url}/nothing")


def test_interrupted_upload_is_not_a_checkpoint_and_is_cleared_away(url: str, tmp_path: Path) -> None:
    """A folder without its manifest is neither listed nor resumed; the next upload deletes it and reuses no number."""
    with open_at(url, tmp_path / "a") as directory:
        directory.check_writable()
        save(directory, 1, 2)
    del MemoryFileSystem.store[f"{url.removeprefix('memory:/')}/save-000002-step-2/manifest.json"]
    with open_at(url, tmp_path / "b") as other:
        other.check_writable()
        found = other.latest()
        assert found is not None
        assert found.manifest.progress.step == 1
        with pytest.raises(CorruptCheckpointError, match="its upload was interrupted"):
            other.open("save-000002-step-2")
        save(other, 2)
    assert other.names() == ["save-000003-step-2", "save-000001-step-1"]
    assert not any(name.startswith("save-000002") for name in files(url))


def test_a_run_finishes_the_upload_in_which_the_last_one_was_killed(url: str, tmp_path: Path) -> None:
    """The local copy is newer than everything at the URL: it is uploaded, and resumed, and that is reported."""
    told = Told()
    with open_at(url, tmp_path) as directory:
        directory.check_writable()
        save(directory, 1, 2)
    (directory.path / "save-000002-step-2" / ".uploaded").unlink()
    del MemoryFileSystem.store[f"{url.removeprefix('memory:/')}/save-000002-step-2/manifest.json"]
    reader = open_at(url, tmp_path)
    assert steps(reader) == [1]
    with open_at(url, tmp_path, told) as again:
        again.check_writable()
        found = again.latest()
    assert found is not None
    assert found.manifest.progress.step == 2
    assert steps(again) == [1, 2]
    assert [text.split(" was ")[0] for text in told] == ["save-000002-step-2"]


def test_a_run_that_follows_an_outage_uploads_the_newest_and_the_best(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three checkpoints that no upload has reached, these two; the third is neither resumed nor best."""
    told = Told()

    def fail(self: Any, *args: Any, **options: Any) -> None:
        raise ConnectionError("unreachable")

    directory = open_at(url, tmp_path, told, best="max acc")
    directory.check_writable()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", fail)
        for step, acc in ((1, 0.1), (2, 0.9), (3, 0.2)):
            save(directory, step, metrics={"acc": acc})
        assert not directory.close()
    assert [text for text in told if "the next run" in text] == [text for text in told if "step-3 is not in" in text]
    with open_at(url, tmp_path, told, best="max acc") as again:
        again.check_writable()
        found = again.latest()
        assert found is not None
        assert found.manifest.progress.step == 3
        save(again, 4, metrics={"acc": 0.5})
    assert steps(again) == [2, 3, 4]
    best = again.best()
    assert best is not None
    assert best.manifest.progress.step == 2


def test_damaged_file_is_skipped_and_a_damaged_copy_downloaded_again(url: str, tmp_path: Path) -> None:
    """Of a checkpoint whose file was changed at the URL the one before is used; a changed local copy is replaced."""
    told = Told()
    with open_at(url, tmp_path / "a", told) as directory:
        directory.check_writable()
        save(directory, 1, 2)
        assert directory.wait_uploaded()
        copy = directory.path / "save-000002-step-2" / "model.safetensors"
        damaged = copy.read_bytes()[:-1] + b"!"
        copy.write_bytes(damaged)
        latest = directory.latest()
        assert latest is not None
        assert latest.weights()["w"].tolist() == [2.0] * 3
    MemoryFileSystem().pipe_file(f"{url}/save-000002-step-2/model.safetensors", damaged)
    found = open_at(url, tmp_path / "b", told).latest()
    assert found is not None
    assert found.manifest.progress.step == 1
    assert len(told) == 1
    assert "model.safetensors was changed" in told[0]


class CableError(Exception):
    """What a backend raises, of no known kind."""


def test_failed_upload_is_reported_tried_again_and_kept(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names file, URL and error; nothing is lost where the store comes back, or the next run uploads it."""
    told = Told()
    put, is_broken = MemoryFileSystem.put_file, threading.Event()

    def put_file(self: Any, local: str, remote: str, **options: Any) -> Any:
        if is_broken.is_set():
            raise CableError("the cable was pulled")
        return put(self, local, remote, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    directory = open_at(url, tmp_path, told)
    directory.check_writable()
    save(directory, 1)
    assert directory.wait_uploaded()
    is_broken.set()
    save(directory, 2)
    assert not directory.wait_uploaded()
    assert "save-000002-step-2 was not uploaded: uploading" in told[0]
    assert f"to {url}/save-000002-step-2/model.safetensors: the cable was pulled (CableError)" in told[0]
    is_broken.clear()
    save(directory, 3)
    assert directory.wait_uploaded()
    assert steps(directory) == [1, 2, 3]
    is_broken.set()
    save(directory, 4)
    told.clear()
    assert not directory.close()
    assert f"save-000004-step-4 is not in {url}" in told[-1]
    assert "the next run that resumes with this staging directory uploads it" in told[-1]
    is_broken.clear()
    with open_at(url, tmp_path, told) as again:
        again.check_writable()
        found = again.latest()
    assert found is not None
    assert found.manifest.progress.step == 4


def test_save_waits_while_too_many_uploads_are_queued(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two checkpoints may be on their way; the third save waits, which is said, and goes on when one has arrived."""
    told, may_go = Told(), threading.Event()
    put = MemoryFileSystem.put_file

    def put_file(self: Any, *args: Any, **options: Any) -> Any:
        assert may_go.wait(20)
        return put(self, *args, **options)

    def report(text: str) -> None:
        told.append(text)
        may_go.set()

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    directory = CheckpointDir(url, staging_dir=tmp_path, keep=1, report=report)
    directory.check_writable()
    save(directory, 1, 2)
    assert told == []
    save(directory, 3)
    assert told[0].startswith(f"training waits for uploads to {url}: 2 checkpoints are not there yet")
    assert directory.close()
    assert steps(directory) == [3]
    assert len([path for path in directory.path.iterdir() if path.name.startswith("save-")]) == 1


def test_set_aside_lists_checkpoints_without_copying_them(url: str, tmp_path: Path) -> None:
    """A run that starts over resumes and prunes nothing of the one before it; its numbers go on."""
    with open_at(url, tmp_path, keep=1, best="max acc") as directory:
        directory.check_writable()
        save(directory, 1, metrics={"acc": 1.0})
    told = Told()
    with open_at(url, tmp_path, told, keep=1, best="max acc") as again:
        again.check_writable()
        assert again.set_aside() == f"{url}/earlier-1"
        assert again.latest() is None
        save(again, 7, 8, metrics={"acc": 0.1})
    assert again.names() == ["save-000003-step-8", "save-000002-step-7"], "the first is the best of this run"
    assert "save-000001-step-1/manifest.json" in files(url)
    assert told == []
    with open_at(url, tmp_path) as third:
        third.check_writable()
        assert third.set_aside() == f"{url}/earlier-2"
        assert third.set_aside() is None


def test_a_second_run_takes_the_url_over_and_the_first_is_refused(url: str, tmp_path: Path) -> None:
    """Runs on two machines with one URL: the second is warned; the first keeps its checkpoints and says so."""
    first_told, second_told = Told(), Told()
    first = open_at(url, tmp_path / "a", first_told)
    first.check_writable()
    save(first, 1)
    assert first.wait_uploaded()
    claim = f"{url}/writer.json"
    owner = json.loads(MemoryFileSystem().cat_file(claim))
    MemoryFileSystem().pipe_file(claim, json.dumps({**owner, "host": "node7"}).encode())
    with open_at(url, tmp_path / "b", second_told) as second:
        second.check_writable()
        assert f"process {owner['process']} on node7" in second_told[0]
        assert second.latest() is not None
        save(second, 2)
        assert second.wait_uploaded()
        save(first, 2)
        assert not first.close()
        assert "a different run has started to write there" in first_told[0]
    assert second.names() == ["save-000002-step-2", "save-000001-step-1"]
    assert "writer.json" not in files(url)


def test_checkpoints_deleted_at_the_url_are_not_resumed_from_copies(url: str, tmp_path: Path) -> None:
    """Who empties the bucket begins again; the copy, which may be the last one, is moved aside, and that is said."""
    told = Told()
    with open_at(url, tmp_path) as directory:
        directory.check_writable()
        save(directory, 1)
    MemoryFileSystem().rm(url, recursive=True)
    with open_at(url, tmp_path, told) as again:
        again.check_writable()
        assert again.latest() is None
        save(again, 5)
    assert steps(again) == [5]
    assert (again.path / "earlier-1" / "save-000001-step-1" / "manifest.json").exists()
    assert len(told) == 1
    assert "were deleted, so the run begins again" in told[0]


def test_disk_as_url_has_folders_that_come_and_go(tmp_path: Path) -> None:
    """`file://` makes the folders it needs, and none stays of what was deleted; a torn manifest is no checkpoint."""
    url, told = f"file://{tmp_path}/far [1]/run", Told()
    with open_at(url, tmp_path / "staging", told, keep=2) as directory:
        directory.check_writable()
        save(directory, 1, 2, 3)
    far = tmp_path / "far [1]" / "run"
    assert sorted(path.name for path in far.iterdir()) == ["save-000002-step-2", "save-000003-step-3"]
    manifest = far / "save-000003-step-3" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    found = open_at(url, tmp_path / "b", told).latest()
    assert found is not None
    assert found.manifest.progress.step == 2
    assert "manifest.json is truncated" in told[0]


def test_download_to_a_full_or_refused_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No older checkpoint is used because a newer one could not be stored."""
    url = f"file://{tmp_path}/far"
    with open_at(url, tmp_path / "a") as directory:
        directory.check_writable()
        save(directory, 1, 2)

    def get_file(self: Any, *args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    with pytest.raises(CheckpointError, match="No space left on device.*choose a different `staging_dir`"):
        open_at(url, tmp_path / "b").latest()
    assert [path.name for path in open_at(url, tmp_path / "b").path.iterdir()] == [".fetching"]


_NOT_CLOSED = """
import shutil, sys, torch
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.manifest import RunProgress
folder = sys.argv[1]
lost, kept = (CheckpointDir(f"file://{folder}/{name}", staging_dir=f"{folder}/staging") for name in ("a", "b"))
for directory in (lost, kept):
    directory.check_writable()
shutil.rmtree(f"{folder}/a")
open(f"{folder}/a", "w").close()
for directory in (lost, kept):
    directory.save(RunProgress(step=1), weights={"model": {"w": torch.ones(2)}})
del lost
"""


def test_uploads_end_and_are_reported_when_the_program_ends_without_close(tmp_path: Path) -> None:
    """The interpreter waits for what is on its way; what failed is named, also if nothing asked for it."""
    command = [sys.executable, "-c", _NOT_CLOSED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert open_at(f"file://{tmp_path}/b", tmp_path / "c").names() == ["save-000001-step-1"]
    assert f"ddpilot: save-000001-step-1 is not in file://{tmp_path}/a: " in done.stderr
    assert "FileExistsError" in done.stderr or "NotADirectoryError" in done.stderr
    assert not (tmp_path / "b" / "writer.json").exists()


def test_staging_that_is_deleted_during_training_is_made_again(url: str, tmp_path: Path) -> None:
    """The next save says so, and is uploaded under a number of its own."""
    told = Told()
    with open_at(url, tmp_path, told) as directory:
        directory.check_writable()
        save(directory, 1)
        assert directory.wait_uploaded()
        shutil.rmtree(directory.path)
        save(directory, 2)
    assert directory.names() == ["save-000002-step-2", "save-000001-step-1"]
    assert len(told) == 1
