# SPDX-License-Identifier: Apache-2.0
"""What PowerSGD keeps follows its parameters into other buckets; options that `comm` takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpilot.errors import LoopError
from ddpilot.training.models.comm_hooks import CarriedErrors, PowerSGD, check_comm, check_compressible, describe_comm


def make(model: nn.Module) -> CarriedErrors:
    """What is kept for `model`, as if DDP held it."""
    ddp: Any = SimpleNamespace(module=model)
    return CarriedErrors(PowerSGD(rank=1, start=2, min_compression_rate=1).make_state(), print, ddp)


def bucket_of(index: int, *parameters: torch.Tensor) -> Any:
    """A bucket with these parameters, in order."""
    flat = torch.zeros(sum(one.numel() for one in parameters))
    return SimpleNamespace(index=lambda: index, parameters=lambda: list(parameters), buffer=lambda: flat)


def test_errors_follow_their_parameters_into_other_buckets_and_through_a_checkpoint() -> None:
    """One bucket becomes two in the other order, as when DDP rebuilds them; matrices are in the order of shapes."""
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False)])
    first, bias, second, third = model.parameters()
    kept = make(model)
    kept.fit(bucket_of(0, first, bias, second, third))
    assert not kept.state.error_dict
    kept.state.error_dict[0] = torch.arange(12.0 + 3 + 12 + 12)
    kept.state.q_memory_dict[0] = torch.tensor([*[1.0] * 4, *[3.0] * 4, *[2.0] * 3])  # first and third have one shape
    kept.state.p_memory_dict[0] = torch.zeros(10)
    saved = kept.state_dict()
    assert list(kept.state.error_dict) == [0]
    loaded = make(model)
    loaded.load_state_dict(saved)
    for one in (kept, loaded):
        one.fit(bucket_of(0, third, second))
        one.fit(bucket_of(1, bias, first))
        assert one.state.error_dict[0].tolist() == [*range(27, 39), *range(15, 27)]
        assert one.state.error_dict[1].tolist() == [12, 13, 14, *range(12)]
        assert one.state.q_memory_dict[0].tolist() == [3] * 4 + [2] * 3
        assert one.state.q_memory_dict[1].tolist() == [1] * 4
    assert saved["errors"].keys() == {"0.weight", "0.bias", "1.weight", "2.weight"}
    again = make(model)
    again.load_state_dict(saved)
    assert again.state_dict()["errors"].keys() == saved["errors"].keys(), "before the first update, nothing is lost"
    loaded.forget()
    assert not (loaded.state.error_dict)
    assert not (loaded.state.q_memory_dict)
    assert not (loaded.state_dict()["errors"])


@pytest.mark.parametrize("comm", [None, "bf16", "fp16", "powersgd", PowerSGD(rank=4), print, (None, print)])
def test_check_comm_takes_names_options_and_hooks(comm: Any) -> None:
    """And each has a text and a reason."""
    check_comm(comm)
    assert all(describe_comm(comm))


@pytest.mark.parametrize("comm", ["int8", 3, PowerSGD, (None, None), (1, 2, 3)])
def test_check_comm_refuses_the_rest(comm: Any) -> None:
    """With what there is."""
    with pytest.raises(LoopError, match="Use 'bf16', 'fp16', 'powersgd'"):
        check_comm(comm)


def test_powersgd_takes_float64_and_refuses_sparse_gradients() -> None:
    """By name."""
    check_compressible(nn.Linear(1, 1).double(), "powersgd")
    with pytest.raises(LoopError, match='comm="powersgd"`: layer 0 has sparse gradients'):
        check_compressible(nn.Sequential(nn.Embedding(2, 1, sparse=True)), PowerSGD())
