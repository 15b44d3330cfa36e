# SPDX-License-Identifier: Apache-2.0
"""Clipping by value and by norms of each type, of whole and of sharded gradients."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from ddpilot.errors import NonFiniteError
from ddpilot.training.loop import Loop
from ddpilot.training.models.optimizers import full_state
from tests.dist.training.bodies import launch

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")
same = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-13)
NORM_TYPES = (1, 2, 3.0, math.inf)
NUM_SAMPLES, BATCH_SIZE = 9, 4


def make() -> tuple[nn.Sequential, torch.optim.Optimizer, TensorDataset]:
    """The same every time. The last batch has one sample."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    data = TensorDataset(torch.randn(NUM_SAMPLES, 3).double(), torch.randn(NUM_SAMPLES, 1).double())
    return model, torch.optim.SGD(model.parameters(), lr=0.3), data


def plainly(norm_type: float | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms and weights; None: clipped by value."""
    model, optimizer, data = make()
    norms = []
    for ids in torch.arange(NUM_SAMPLES).split(BATCH_SIZE):  # type: ignore[no-untyped-call]
        x, y = data[ids]
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        if norm_type is None:
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
        else:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type).item())
        optimizer.step()
    return norms, model.state_dict()


def with_closure(shard: Any) -> Any:
    """Weights after updates whose optimizer computes the gradients by a closure and clips them by value."""
    loop = Loop(progress=False)
    given, old, data = make()
    model, optimizer = loop.prepare(given, old, shard=shard)
    for x, y in loop.batches(loop.loader(data, global_batch_size=BATCH_SIZE)):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            loop.backward(mse_loss(model(x), y))
            loop.clip_grad_value_(model.parameters(), 0.05)

        loop.step(optimizer, closure=closure)
    return full_state(model)


def with_loop(shard: Any, norm_type: float | None, spoils: bool = False) -> tuple[list[float], Any]:
    """The same with a `Loop`. `spoils`: the last rank makes one gradient infinite, of a finite loss."""
    loop = Loop(progress=False)
    given, old, data = make()
    model, optimizer = loop.prepare(given, old, shard=shard)
    norms = []
    for x, y in loop.batches(loop.loader(data, global_batch_size=BATCH_SIZE)):
        output = model(x)
        if spoils and loop.rank == loop.world_size - 1:
            output.register_hook(lambda gradient: gradient * math.inf)
        loop.backward(mse_loss(output, y))
        if norm_type is None:
            loop.clip_grad_value_(model.parameters(), 0.05)
        else:
            norm = loop.clip_grad_norm_(model.parameters(), 0.1, norm_type)
            norms.append(norm.item() if norm is not None else math.nan)
        loop.step(optimizer)
    return norms, full_state(model)


def on_ranks() -> list[Any]:
    """All kinds, whole and sharded; and what an infinite gradient raises before it is clipped."""
    found: list[Any] = [with_loop(shard, kind) for shard in (None, "parameters") for kind in (*NORM_TYPES, None)]
    found += [([], with_closure(shard)) for shard in (None, "parameters")]
    for shard in (None, "parameters"):
        try:
            with_loop(shard, None, spoils=True)
        except NonFiniteError as error:
            found.append(str(error))
    return found


def test_clipping_has_the_numbers_of_plain_pytorch() -> None:
    """In DDP and with sharded parameters, also in a closure; clipping by value does not hide what is not finite."""
    kinds = [plainly(kind) for kind in (*NORM_TYPES, None)]
    for rank, found in enumerate(launch(2, on_ranks)):
        assert len(found) == 2 * len(kinds) + 4
        for (norms, weights), (plain_norms, plain_weights) in zip(
            found[:-2], [*kinds * 2, *kinds[-1:] * 2], strict=True
        ):
            same(torch.tensor(norms), torch.tensor(plain_norms))
            if weights:  # sharded ones are on rank 0 only
                same({name.removeprefix("module."): one for name, one in weights.items()}, plain_weights)
            else:
                assert rank == 1
        assert all("not finite" in text for text in found[-2:])
