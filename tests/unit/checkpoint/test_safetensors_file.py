# SPDX-License-Identifier: Apache-2.0
"""Weights above a size are split into several safetensors files with an index, which Hugging Face's library reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.manifest import RunProgress
from ddpilot.checkpoint.safetensors_file import split_weights
from ddpilot.checkpoint.weights import load_weights
from ddpilot.errors import CheckpointError, CorruptCheckpointError

INDEX = "model.safetensors.index.json"


def make_model() -> torch.nn.Sequential:
    """Tensors of 128, 16, 64 and 16 bytes."""
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4))


def save_split(folder: Path, model: torch.nn.Module) -> Path:
    """A checkpoint whose files have at most 100 bytes of weights, and its path."""
    with CheckpointDir(folder, max_file_bytes=100) as directory:
        directory.save(RunProgress(step=1), weights={"model": model.state_dict(), "small": {"w": torch.ones(2)}})
    return folder / directory.names()[0]


def test_split_weights_fills_files_up_to_the_limit() -> None:
    """Tensors keep their order, a file may be exactly full, and a larger tensor has its own file."""
    weights = make_model().state_dict()
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    cases: dict[int, list[list[str]]] = {
        224: [names],
        223: [names[:3], names[3:]],
        96: [names[:1], names[1:]],
        95: [names[:1], names[1:3], names[3:]],
        1: [[name] for name in names],
    }
    for limit, groups in cases.items():
        assert list(split_weights("m", weights, limit).values()) == groups, limit
    assert list(split_weights("m", weights, 223)) == ["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"]
    assert split_weights("m", {}, 1) == {"m.safetensors": []}


def test_split_checkpoint_is_verified_and_read(tmp_path: Path) -> None:
    """Every file is in the manifest; other models stay in one file; a damaged part makes the checkpoint corrupt."""
    model = make_model()
    path = save_split(tmp_path, model)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX, "small.safetensors"]
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", *names, "state.pt"]
    assert json.loads((path / INDEX).read_text())["metadata"] == {"total_size": 224}
    found = CheckpointDir(tmp_path).latest()
    assert found is not None
    assert set(found.manifest.files) == {*names, "state.pt"}
    torch.testing.assert_close(found.weights(), dict(model.state_dict()), rtol=0, atol=0)
    assert found.weights("small")["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="it has weights for 'model', 'small'"):
        found.weights("critic")
    (path / names[1]).unlink()
    with pytest.raises(CorruptCheckpointError, match="model-00002-of-00002.safetensors is missing"):
        CheckpointDir(tmp_path).latest()


def test_split_weights_are_hugging_faces_in_both_directions(tmp_path: Path) -> None:
    """Hugging Face's library loads a split checkpoint, and its own split files are loaded by index or directory."""
    ours, theirs = make_model(), make_model()
    path = save_split(tmp_path / "ours", ours)
    shutil.move(path / "small.safetensors", tmp_path)
    huggingface_hub.load_torch_model(theirs, path)
    torch.testing.assert_close(theirs.state_dict(), ours.state_dict(), rtol=0, atol=0)
    (tmp_path / "theirs").mkdir()
    huggingface_hub.save_torch_state_dict(make_model().state_dict(), tmp_path / "theirs", max_shard_size=100)
    huggingface_hub.load_torch_model(theirs, tmp_path / "theirs")
    for source in (tmp_path / "theirs", tmp_path / "theirs" / INDEX):
        loaded = make_model()
        load_weights(loaded, source)
        torch.testing.assert_close(loaded.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_index_is_an_error_when_it_does_not_fit_its_files(tmp_path: Path) -> None:
    """A missing tensor, a file elsewhere and an incomplete index are named, and the model is unchanged."""
    path = save_split(tmp_path, make_model())
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    index = json.loads((path / INDEX).read_text())
    first = "model-00001-of-00002.safetensors"
    cases = {
        json.dumps({"weight_map": {**index["weight_map"], "2.weight": first}}): f"'2.weight' is not in {first}",
        json.dumps({"weight_map": {"0.weight": "../other.safetensors"}}): "'../other.safetensors', which is outside of",
        json.dumps({"weight_map": {"0.weight": 3}}): "not a complete index of safetensors files",
        '{"weight_map": {"0.weight"': "not a complete index of safetensors files",
    }
    for text, found in cases.items():
        (path / INDEX).write_text(text)
        with pytest.raises(CorruptCheckpointError, match=found):
            load_weights(model, path / INDEX)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_max_file_bytes_is_refused_when_it_is_not_positive(tmp_path: Path) -> None:
    """The option is named before anything is written."""
    with pytest.raises(CheckpointError, match="`max_file_bytes` is 0"):
        CheckpointDir(tmp_path, max_file_bytes=0)
