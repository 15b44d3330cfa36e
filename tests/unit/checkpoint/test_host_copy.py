# SPDX-License-Identifier: Apache-2.0
"""Copies are exact, their own, and only of what loads without running code."""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from ddpilot.checkpoint.atomic_files import HashingFile
from ddpilot.checkpoint.host_copy import Arena, HostCopy
from ddpilot.checkpoint.safetensors_file import DTYPE_NAMES, write_safetensors
from ddpilot.errors import CheckpointError
from ddpilot.group.device import capture_rng, restore_rng


class Number(int):
    """No plain number."""


def test_take_copies_what_loads_without_code(tmp_path: Path) -> None:
    """Every kind that is let through comes back from `torch.load(weights_only=True)` equal and of the same type."""
    tree: dict[Any, Any] = {
        "counter": Counter([1, 1, 2]),
        "ordered": OrderedDict(a=[1, 2.5]),
        "set": {1, "x"},
        "tuple": (1, None, 1j, b"xy", True, float("inf")),
        "torch": [torch.float64, torch.device("cpu"), torch.Size([2])],
        ("a", 1): {0: {"step": 3}},
    }
    taken = HostCopy().take(tree)
    torch.save(taken, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert loaded == taken == tree
    assert type(loaded["counter"]) is Counter
    assert type(HostCopy().take({"lr": np.float64(0.5)})["lr"]) is float


def test_take_refuses_what_would_need_code() -> None:
    """The path to it is named, with what it is."""
    cases: list[tuple[Any, str]] = [
        (np.ones(2), "numpy.ndarray"),
        (Number(1), ".*Number"),
        (len, "builtins.builtin_function_or_method"),
        ({Number(1): 2}, "dict with a key of type .*Number"),
        (torch.ones(2).to_sparse(), "Tensor of layout torch.sparse_coo on cpu"),
        (torch.ones(2, device="meta"), "Tensor of layout torch.strided on meta"),
    ]
    for value, said in cases:
        with pytest.raises(CheckpointError, match=rf"\['a'\]\[1\] is a {said}"):
            HostCopy().take({"a": [0, value]})


def layouts() -> dict[str, torch.Tensor]:
    """One tensor of each layout that copying has a branch for."""
    base = torch.randn(2, 3, 4, 5)
    return {
        "large": torch.randn(3, 1_100_000),
        "larger": torch.randn(1_200_000),
        "largest": torch.randn(1_300_000),
        "transposed": base.transpose(0, 1),
        "sliced": base[:, ::2],
        "expanded": torch.randn(1).expand(7),
        "channels last": base.to(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.randn(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }


def test_take_copies_every_layout_exactly_also_into_used_memory() -> None:
    """Twice, with other values and in another order: equal, dense, detached, and with memory of their own."""
    snapshots = HostCopy()
    for turn in (1, -1):
        tensors = dict([*layouts().items()][::turn])
        taken = snapshots.take(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(taken[name], tensor.detach()), name
            assert taken[name].dtype == tensor.dtype
            assert not taken[name].requires_grad
            assert taken[name].untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name
        assert taken["channels last"].is_contiguous(memory_format=torch.channels_last)
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in taken.values() if t.numel())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_take_copies_tied_tensors_once() -> None:
    """Tensors that are one stay one; equal memory seen in another shape does not count as the same."""
    weight = torch.randn(2, 3)
    taken = HostCopy().take({"a": weight, "b": weight.detach(), "c": weight.view(3, 2)})
    assert taken["a"] is taken["b"]
    assert taken["c"].shape == (3, 2)


def test_arena_hands_out_the_memory_that_was_reserved() -> None:
    """What was reserved is used by what comes, and again after a reset."""
    arena = Arena()
    arena.reserve(5_000_000)
    first = arena.allocate(1_000)
    second = arena.allocate(4_000_000)
    assert first.data_ptr() < second.data_ptr() < first.data_ptr() + 5_000_000
    arena.reset()
    assert arena.allocate(7).data_ptr() == first.data_ptr()


def test_write_safetensors_is_read_by_the_library(tmp_path: Path) -> None:
    """Every element type and layout, tied and empty tensors, odd names, and no tensors at all."""
    tensors = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPE_NAMES}
    tensors |= {name: value.detach() for name, value in layouts().items() if value.numel() < 1_000_000}
    tensors["ünïcode \"'\n"] = tensors["tied"] = tensors["bfloat16"]
    for content in (tensors, {}):
        with HashingFile(tmp_path / f"{len(content)}.safetensors") as sink:
            write_safetensors(sink, HostCopy().take(content))
        loaded = safetensors.torch.load_file(tmp_path / f"{len(content)}.safetensors")
        assert set(loaded) == set(content)
        for name, value in content.items():
            assert (loaded[name].dtype, loaded[name].shape) == (value.dtype, value.shape)
            assert torch.equal(
                loaded[name].reshape(-1).view(torch.uint8),
                value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8),
            )


def test_restore_rng_repeats_what_was_drawn(tmp_path: Path) -> None:
    """Python, numpy (with a normal number kept back) and torch draw the same again, through a file."""
    random.gauss(0, 1)
    np.random.normal()
    torch.save(HostCopy().take(capture_rng(torch.device("cpu"))), tmp_path / "rng.pt")

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), *np.random.normal(size=3), *torch.randn(3).tolist()]

    drawn = draw()
    states = torch.load(tmp_path / "rng.pt", weights_only=True)
    restore_rng(states)
    assert draw() == drawn
    restore_rng({**states, "cuda": torch.zeros(16, dtype=torch.uint8)}, torch.device("cpu"))
    assert draw() == drawn
