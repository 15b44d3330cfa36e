# SPDX-License-Identifier: Apache-2.0
"""Weights from anywhere go into any wrapping of the same model, whole or not at all, with every difference named."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.manifest import RunProgress
from ddpilot.checkpoint.safetensors_file import plain_names
from ddpilot.checkpoint.weights import load_into, load_weights
from ddpilot.errors import CheckpointError, CorruptCheckpointError, MismatchedCheckpointError


class Wrapped(torch.nn.Module):
    """Puts `module.` before every name, as DistributedDataParallel does."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


class Compiled(torch.nn.Module):
    """Puts `_orig_mod.` before every name, as torch.compile does."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def make_model() -> torch.nn.Sequential:
    """A layer with a compiled one behind it."""
    return torch.nn.Sequential(torch.nn.Linear(2, 3), Compiled(torch.nn.Linear(3, 1)))


def test_plain_names_remove_what_wrappers_put_there() -> None:
    """DDP's prefix goes only where every name has it, torch.compile's from wherever it stands."""
    cases = {
        ("w", "b"): ["w", "b"],
        ("module.w", "module.b"): ["w", "b"],
        ("module._orig_mod.w",): ["w"],
        ("_orig_mod.module.w",): ["w"],
        ("0._orig_mod.w", "1.w"): ["0.w", "1.w"],
        ("module.w", "n_averaged"): ["module.w", "n_averaged"],
        ("module.module.w", "module.n_averaged"): ["module.w", "n_averaged"],
        ("module",): ["module"],
        (): [],
    }
    for names, plain in cases.items():
        assert plain_names(names) == dict(zip(names, plain, strict=True))


def test_plain_names_refuse_when_two_become_one() -> None:
    """Both names are said."""
    with pytest.raises(CheckpointError, match="'w.x' and 'w._orig_mod.x' would both be 'w.x'"):
        plain_names(["w.x", "w._orig_mod.x"])


def no_wrapping(module: torch.nn.Module) -> torch.nn.Module:
    """The model itself."""
    return module


@pytest.mark.parametrize("form", ["pt", "nested", "model", "safetensors", "checkpoint", "directory", "split"])
def test_load_weights_fits_any_wrapping_to_any_file(tmp_path: Path, form: str) -> None:
    """Plain, DDP or compiled, out of a state dict, a nested one, safetensors or a checkpoint."""
    for number, wrap_source in enumerate((no_wrapping, Wrapped, Compiled)):
        source = make_model()
        path = write_weights(tmp_path / str(number), form, wrap_source(source).state_dict())
        for wrap_target in (no_wrapping, Wrapped, Compiled):
            target = make_model()
            load_weights(wrap_target(target), path)
            for own, given in zip(target.parameters(), source.parameters(), strict=True):
                assert torch.equal(own, given), (wrap_source, wrap_target)


def write_weights(folder: Path, form: str, weights: dict[str, torch.Tensor]) -> Path:
    """`weights` in a file or checkpoint in `folder`, and the path to it."""
    folder.mkdir()
    if form in ("checkpoint", "directory", "split"):
        with CheckpointDir(folder, max_file_bytes=20 if form == "split" else 5_000_000_000) as directory:
            directory.save(RunProgress(step=1), weights={"model": weights})
        return folder / directory.names()[0] if form == "checkpoint" else folder
    if form == "safetensors":
        safetensors.torch.save_file(weights, folder / "weights.safetensors")
        return folder / "weights.safetensors"
    nested = {"nested": {"epoch": 3, "state_dict": weights}, "model": {"model": {"state_dict": weights}}}
    torch.save(nested.get(form, weights), folder / "weights.pt")
    return folder / "weights.pt"


def test_load_into_lists_every_difference_and_changes_nothing() -> None:
    """Missing, unexpected and mis-shaped names, with both shapes; the model keeps its weights."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {"module.0.weight": torch.ones(4, 2), "module.0.bias": torch.ones(3), "module.2.bias": torch.ones(1)}
    with pytest.raises(MismatchedCheckpointError) as caught:
        load_into(model, weights, source="x.pt")
    assert str(caught.value) == (
        "loading x.pt into a Sequential: the architecture differs; 2 missing: 1.weight, 1.bias; "
        "1 unexpected: 2.bias; 1 mis-shaped: 0.weight (4, 2) where the model has (3, 2). "
        "Create the model as in the saved run."
    )
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_load_weights_keeps_the_models_tensors(tmp_path: Path) -> None:
    """Weights are loaded in place, into the tensors that an optimizer holds, cast to their type.

    What is in safetensors is seen from the file, not from its name.
    """
    model = torch.nn.Linear(2, 1)
    torch.save({"weight": torch.ones(1, 2, dtype=torch.float64), "bias": torch.ones(1)}, tmp_path / "x.pt")
    weight = model.weight
    load_weights(model, tmp_path / "x.pt")
    assert model.weight is weight
    assert weight.dtype == torch.float32
    assert weight.tolist() == [[1, 1]]
    safetensors.torch.save_file({"weight": torch.full((1, 2), 2.0), "bias": torch.ones(1)}, tmp_path / "renamed.bin")
    load_weights(model, tmp_path / "renamed.bin")
    assert weight.tolist() == [[2, 2]]


def test_load_weights_names_what_a_file_is_instead(tmp_path: Path) -> None:
    """A whole model, a list, another dict, a torn file, and none at all."""
    model = torch.nn.Linear(2, 1)
    contents: dict[str, tuple[Any, str]] = {
        "model.pt": (Wrapped(model), r"reading it would run .*Wrapped.*If you trust it"),
        "list.pt": ([1], "it contains a list, not a dict"),
        "other.pt": (
            {"epoch": 3, "optimizer": {}},
            "it does not contain a state_dict, but 'epoch': int, 'optimizer': dict",
        ),
        "empty.pt": ({}, "it does not contain a state_dict, but nothing"),
    }
    for name, (content, said) in contents.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(CheckpointError, match=said):
            load_weights(model, tmp_path / name)
    for protocol in (0, 2, 4):
        (tmp_path / "plain.pt").write_bytes(pickle.dumps({"state_dict": Wrapped(model)}, protocol=protocol))
        with pytest.raises(CorruptCheckpointError, match=r"would run [\w.]+\. If you trust it") as caught:
            load_weights(model, tmp_path / "plain.pt")
        assert "likely succeed" not in str(caught.value)
    for name in ("torn.pt", "torn.safetensors"):
        (tmp_path / name).write_bytes((tmp_path / "list.pt").read_bytes()[:200])
        with pytest.raises(CorruptCheckpointError, match=f"{name}: it (is not a complete|cannot be read)"):
            load_weights(model, tmp_path / name)
    for path in (tmp_path / "none.pt", tmp_path):
        with pytest.raises(CheckpointError, match="neither a file nor a checkpoint"):
            load_weights(model, path)
