# SPDX-License-Identifier: Apache-2.0
"""A model that cannot run zero rows gives out zero rows, with a graph to all its parameters, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ddpilot.training.step.empty_batch import EmptyBatchForward


class Output(NamedTuple):
    """What a model gives out."""

    loss: torch.Tensor
    rows: torch.Tensor
    by_layer: list[torch.Tensor]


class Masked(nn.Module):
    """A transformer with a mask, which torch's does not run without samples; it counts, and drops at random."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor, *, lengths: torch.Tensor) -> Output:
        """ids: (samples, steps); lengths: (samples,)."""
        self.calls += 1
        mask = torch.arange(ids.shape[1])[None] >= lengths[:, None]
        steps = self.layer(self.embed(ids), src_key_padding_mask=mask)
        rows = self.norm(steps[:, 0].reshape(len(ids), -1))
        return Output(rows.mean(), rows, [steps.transpose(0, 1)])


def run_empty(model: nn.Module, call: Callable[[], Any]) -> Any:
    """`call`, while the rank has no sample."""
    stand_ins = EmptyBatchForward()
    stand_ins.begin([model])
    try:
        return call()
    finally:
        stand_ins.end()


def test_a_model_that_fails_on_zero_rows_gives_out_none() -> None:
    """In every part of its output, along the dimension that holds rows; each parameter is reached by the backward."""
    model = Masked()
    ids, lengths = torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    with pytest.raises(RuntimeError):
        model(ids, lengths=lengths)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    found = run_empty(model, lambda: model(ids, lengths=lengths))
    assert (found.rows.shape, found.by_layer[0].shape, found.loss.shape) == ((0, 8), (4, 0, 8), ())
    found.rows.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "forward" not in vars(model)


def test_counters_in_plain_attributes_count_one_forward_pass() -> None:
    """A number, and a tensor that is changed in place, of a model that fails on zero rows after it has counted."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.num, self.steps = 0, torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num += 1
            self.steps += 1
            x.max()  # fails without elements
            return torch.as_tensor(self.layer(x)) / (1 + self.num)

    model = Counter()
    for number in (1, 2):
        assert len(run_empty(model, lambda: model(torch.ones(0, 2)))) == 0
        assert (model.num, model.steps.item()) == (number, number)


def test_a_model_runs_as_it_is_where_it_can() -> None:
    """On rows, and on zero rows that it takes; and an error of its own is the one that is raised."""
    seen = []

    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            if x.ndim == 1:
                raise ValueError(f"{len(x)} rows of one dimension")
            return x

    model = Counting()
    assert len(run_empty(model, lambda: model(torch.ones(3, 2)))) == 3
    assert len(run_empty(model, lambda: model(torch.ones(0, 2)))) == 0
    assert seen == [3, 0]
    with pytest.raises(ValueError, match="3 rows"):
        run_empty(model, lambda: model(torch.ones(3)))
    with pytest.raises(ValueError, match="0 rows"):
        run_empty(model, lambda: model(torch.ones(0)))


def test_a_forward_of_the_models_own_comes_back() -> None:
    """Libraries replace `forward` of an object."""
    model = nn.Identity()
    own = model.forward = lambda x: x.view(len(x), -1)  # type: ignore[method-assign,assignment]
    found = run_empty(model, lambda: model(torch.ones(0, 2)))
    assert (found.shape, model.forward) == ((0, 2), own)
