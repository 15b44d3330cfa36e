# SPDX-License-Identifier: Apache-2.0
"""Weights in 16 bits, and the kinds of precision that leave dtypes unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import FakeGroup
from ddpilot.errors import LoopError
from ddpilot.training.loop import Loop

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")
NUM_SAMPLES, BATCH_SIZE = 12, 4


def make() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """The same every time."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    data = TensorDataset(torch.randn(NUM_SAMPLES, 3), torch.randn(NUM_SAMPLES, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05), data


def with_loop(precision: Any) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    """One epoch; the model, the optimizer and an average of the weights."""
    loop = Loop(group=FakeGroup(), precision=precision, progress=False)
    model, optimizer, data = make()
    model, optimizer = loop.prepare(model, optimizer)
    average = loop.average(model, 0.99)
    for x, y in loop.batches(loop.loader(data, global_batch_size=BATCH_SIZE)):
        with loop.accumulate(model):
            loop.backward(nn.functional.mse_loss(model(x), y))
        loop.step(optimizer)
    return model, optimizer, average


def test_bf16_true_has_the_numbers_of_a_cast_model_under_autocast() -> None:
    """Bit for bit; weights and state are 16 bits wide, the average is not."""
    model, optimizer, average = with_loop("bf16-true")
    plain, _, data = make()
    plain = plain.bfloat16()
    own = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for ids in torch.arange(NUM_SAMPLES).split(BATCH_SIZE):  # type: ignore[no-untyped-call]
        x, y = data[ids]
        own.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(plain(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        own.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
    assert {one.dtype for one in average.parameters()} == {torch.float32}


def test_bf16_true_leaves_batch_norm_in_float32() -> None:
    """Its running statistics would round small changes away."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    Loop(group=FakeGroup(), precision="bf16-true", progress=False).prepare(model)
    assert [one.dtype for one in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2


def test_tf32_has_the_numbers_of_fp32_on_the_cpu() -> None:
    """The setting is of CUDA devices only."""
    before = torch.get_float32_matmul_precision()
    weights = [list(with_loop(kind)[0].parameters()) for kind in ("fp32", "tf32")]
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    assert torch.get_float32_matmul_precision() == before


def test_an_unknown_precision_is_refused() -> None:
    """With those that there are."""
    wrong: Any = "fp8"
    with pytest.raises(LoopError, match="`precision` is 'fp8'. Use 'fp32', 'tf32', 'bf16', 'bf16-true' or 'fp16'"):
        Loop(group=FakeGroup(), precision=wrong)
