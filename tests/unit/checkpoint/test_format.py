# SPDX-License-Identifier: Apache-2.0
"""What is torn or was changed is refused by name, the one before it is used, and no code of a file ever runs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddpilot.checkpoint.atomic_files import read_facts
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.format import check_layout, read_checkpoint
from ddpilot.checkpoint.manifest import Manifest, RunProgress, checksum, parse_manifest
from ddpilot.checkpoint.weights import merge_shards
from ddpilot.errors import CheckpointError, CorruptCheckpointError

FILES = ("manifest.json", "model.safetensors", "state.pt", "rank-0.pt")


@pytest.fixture
def two(tmp_path: Path) -> tuple[CheckpointDir, list[str]]:
    """A directory with two checkpoints, of steps 1 and 2, and what it tells."""
    told: list[str] = []
    with CheckpointDir(tmp_path, report=told.append) as directory:
        for step in (1, 2):
            directory.save(
                RunProgress(step=step), weights={"model": {"w": torch.ones(9)}}, state={"n": step}, parts=[{}]
            )
            assert directory.wait()
    return directory, told


def flip(path: Path) -> None:
    """Change one bit of one byte, anywhere."""
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def truncate(path: Path) -> None:
    """Cut the file, anywhere before its end."""
    os.truncate(path, random.randrange(path.stat().st_size))


def lengthen(path: Path) -> None:
    """Add a byte, not one that JSON would skip."""
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("damage", [flip, truncate, lengthen, Path.unlink])
def test_latest_falls_back_when_a_file_is_damaged(
    two: tuple[CheckpointDir, list[str]], damage: Callable[[Path], None]
) -> None:
    """One bit, a lost end, an added one or a lost file: the damaged file is named and the checkpoint before is used."""
    directory, told = two
    damaged = directory.path / directory.names()[0]
    for name in FILES:
        told.clear()
        whole = (damaged / name).read_bytes()
        damage(damaged / name)
        found = directory.latest()
        assert found is not None
        assert found.manifest.progress.step == 1
        assert len(told) == 1
        assert str(damaged) in told[0]
        assert name in told[0]
        assert told[0].endswith(f"It was skipped; the checkpoint before it is used: {found.path.name}")
        (damaged / name).write_bytes(whole)
    assert directory.latest() == directory.open(damaged.name)


def test_latest_is_an_error_when_all_are_damaged(two: tuple[CheckpointDir, list[str]]) -> None:
    """Beginning anew in silence would lose the run: every damaged one is listed instead."""
    directory, _ = two
    for name in directory.names():
        flip(directory.path / name / "model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"step-2: model.safetensors was changed.*step-1: model") as caught:
        directory.latest()
    assert "Restore one from a copy" in str(caught.value)


def test_manifest_is_not_believed_when_it_was_edited(two: tuple[CheckpointDir, list[str]]) -> None:
    """A number changed by hand does not fit the manifest's own checksum."""
    directory, _ = two
    path = directory.path / directory.names()[0] / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(
        CorruptCheckpointError, match="manifest.json is truncated or was changed.*checksum does not match"
    ):
        directory.open(directory.names()[0])


def test_manifest_is_refused_when_a_newer_version_wrote_it() -> None:
    """Its version is named, and it does not count as damaged."""
    body = json.loads(Manifest(progress=RunProgress(step=1), versions={"ddpilot": "9.1"}).render())
    with pytest.raises(CheckpointError, match="its format is 2, this ddpilot reads up to 1. Use ddpilot 9.1") as caught:
        parse_manifest(json.dumps({**body, "format": 2}), where="x")
    assert not isinstance(caught.value, CorruptCheckpointError)


def test_manifest_is_refused_when_its_fields_are_of_a_different_version() -> None:
    """It is intact: an error with the versions, and not one about damage."""
    body = json.loads(Manifest(progress=RunProgress(step=1), versions={"ddpilot": "0.0.1"}).render())
    del body["checksum"]
    body["progress"]["shards"] = 2
    text = json.dumps({**body, "checksum": checksum(body)})
    with pytest.raises(CheckpointError, match=r"is intact, and .*'shards'.*Use the version .*0\.0\.1") as caught:
        parse_manifest(text, where="save-000001-step-1")
    assert not isinstance(caught.value, CorruptCheckpointError)


def test_layout_of_a_different_version_is_named(tmp_path: Path) -> None:
    """A state that lacks an entry, such as that of an older version, and weights that are not there under any name."""
    with CheckpointDir(tmp_path) as directory:
        directory.save(RunProgress(step=1), weights={}, state={"optimizers": {}, "model": [1]}, parts=[{}])
        assert directory.wait()
        found = directory.open(directory.names()[0])
    with pytest.raises(
        CheckpointError, match=r"state.pt: it has no dict under 'extra', 'kinds', .*wrote it, and this is"
    ):
        check_layout(found, "state.pt", found.state(), ("optimizers", "extra", "kinds"))
    with pytest.raises(CheckpointError, match=r"state.pt: it has no dict under 'others', 'extra', 'kinds'"):
        merge_shards(tmp_path, tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match=r"weights 'model' of .*: it has weights of no model, so"):
        merge_shards(tmp_path, tmp_path / "whole.safetensors")
    assert not list(tmp_path.glob("*whole*"))


def test_manifest_reads_what_it_renders_when_a_metric_is_not_finite() -> None:
    """NaN and infinity are metrics too, and the checksum holds over them."""
    manifest = Manifest(progress=RunProgress(step=1), metrics={"loss": float("inf")})
    assert parse_manifest(manifest.render(), where="x") == manifest
    assert "NaN" in Manifest(progress=RunProgress(step=1), metrics={"loss": float("nan")}).render()


def test_files_outside_of_a_checkpoint_are_not_read(two: tuple[CheckpointDir, list[str]]) -> None:
    """A manifest that names a file elsewhere is refused, also with the right checksum."""
    directory, _ = two
    path = directory.path / directory.names()[0]
    (directory.path / "outside").write_text("x")
    manifest = Manifest(progress=RunProgress(step=1), files={"../outside": read_facts(directory.path / "outside")})
    (path / "manifest.json").write_text(manifest.render())
    with pytest.raises(CorruptCheckpointError, match="'../outside' is outside of it"):
        read_checkpoint(path)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def test_state_runs_no_code_when_the_file_was_replaced(two: tuple[CheckpointDir, list[str]], tmp_path: Path) -> None:
    """A pickle with code, under checksums made to fit, is refused; what it would call is named, and not called."""
    directory, _ = two
    path = directory.path / directory.names()[0]
    mark = tmp_path / "ran"
    torch.save({"n": Evil(mark)}, path / "state.pt")
    files = {**directory.open(directory.names()[1]).manifest.files, "state.pt": read_facts(path / "state.pt")}
    files = {name: read_facts(path / name) for name in files}
    (path / "manifest.json").write_text(Manifest(progress=RunProgress(step=2), files=files).render())
    found = directory.latest()
    assert found is not None
    with pytest.raises(CorruptCheckpointError, match=r"state.pt: .*reading it would run \w+.system"):
        found.state()
    assert not mark.exists()
