# SPDX-License-Identifier: Apache-2.0
"""Looking for the largest batch: the search itself, real allocations that fail, and nothing changed afterwards."""

from __future__ import annotations

import operator
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import FakeGroup
from ddpilot.errors import LoopError
from ddpilot.training.batch_size import find_batch_size, largest_that, scale_lr
from ddpilot.training.loop import Loop

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")

TOO_MUCH = 1 << 50


def test_largest_that_is_within_a_sixteenth() -> None:
    """Exact below 32; never more than what fits."""
    for largest in [*range(1, 300), 1000, 12345]:
        found = largest_that(partial(operator.ge, largest), 10**6)
        assert found == largest if largest < 32 else largest * 15 / 16 <= found <= largest


def test_largest_that_keeps_to_the_limit() -> None:
    """A batch larger than the dataset is never tried."""
    sizes: list[int] = []

    def fits(size: int) -> bool:
        sizes.append(size)
        return True

    assert largest_that(fits, 100) == 100
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 100]
    assert largest_that(lambda size: False, 100) == 0


def test_largest_that_tries_nothing_below_the_first() -> None:
    """One sample, which BatchNorm does not take, is not tried where two do not fit."""
    sizes: list[int] = []

    def fits(size: int) -> bool:
        sizes.append(size)
        return size < 2

    assert largest_that(fits, 100, 2) == 0
    assert sizes == [2]


def run_out(model: Any, batch: Any, above: int) -> torch.Tensor:
    """A loss; the allocator refuses batches of more than `above` samples, half of the way."""
    loss: torch.Tensor = model(batch[0]).square().mean() + torch.rand(()) * random.random()
    if len(batch[0]) > above:
        torch.empty(TOO_MUCH)
    return loss


def make(num_samples: int = 1000) -> tuple[Loop, nn.Sequential, torch.optim.Optimizer, TensorDataset]:
    """A model with statistics and dropout that has been trained one step."""
    loop = Loop(group=FakeGroup())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    model[1].eval()
    return loop, model, optimizer, TensorDataset(torch.randn(num_samples, 3))


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything that a search could change, as bytes."""
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    moments = [value for entries in optimizer.state.values() for value in entries.values()]
    numbers = [[tensor.tolist() for tensor in [*tensors, *moments]], [layer.training for layer in model.modules()]]
    return [*numbers, torch.get_rng_state().tolist(), random.getstate()]


def test_find_batch_size_leaves_everything_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, statistics, moments, gradients, modes and random states, bit for bit, and the same tensors."""
    loop, model, optimizer, data = make()
    before = state(model, optimizer)
    moment = next(iter(optimizer.state.values()))["exp_avg"]
    found = find_batch_size(
        loop, model, optimizer, data, lambda model, batch: run_out(model, batch, 2), max_per_rank=100
    )
    assert (found.largest, found.per_rank, found.global_batch_size) == (2, 1, 1)
    assert [(trial.per_rank, bool(trial.failed_ranks)) for trial in found.trials] == [
        (1, False),
        (2, False),
        (4, True),
        (3, True),
    ]
    assert state(model, optimizer) == before
    assert next(iter(optimizer.state.values()))["exp_avg"] is moment
    assert "fits, " in str(found)
    assert "       4 on a rank: too much for rank 0" in str(found)
    assert "has 2 samples on each rank; less 10%: global_batch_size=1" in capsys.readouterr().out


def test_find_batch_size_gives_a_new_optimizer_no_state() -> None:
    """As if it had never stepped; and no batch is larger than `max_per_rank`."""
    loop, model, _, data = make(50)
    optimizer = torch.optim.AdamW(model.parameters())
    found = find_batch_size(
        loop, model, optimizer, data, lambda model, batch: run_out(model, batch, 10**6), max_per_rank=50, headroom=0
    )
    assert found.per_rank == 50
    assert not optimizer.state


def test_find_batch_size_says_so_when_nothing_fits() -> None:
    """With the rank, and what makes a model smaller."""
    loop, model, optimizer, data = make()
    with pytest.raises(LoopError, match=r"one sample does not fit into the memory of rank 0 \(cpu here\). Use prec"):
        find_batch_size(loop, model, optimizer, data, lambda model, batch: run_out(model, batch, 0), max_per_rank=9)
    with pytest.raises(LoopError, match="`headroom` is 1"):
        find_batch_size(loop, model, optimizer, data, lambda model, batch: run_out(model, batch, 0), headroom=1)


def test_find_batch_size_lets_other_errors_through() -> None:
    """A bug in the step is no batch that is too large; the model is as it was then too."""
    loop, model, optimizer, data = make()
    before = state(model, optimizer)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        find_batch_size(loop, model, optimizer, data, lambda model, batch: model(batch[0].T).sum(), max_per_rank=9)
    assert state(model, optimizer) == before


def test_find_batch_size_asks_for_a_limit_on_the_cpu() -> None:
    """The kernel would end the process that takes too much, and no allocation would fail."""
    loop, model, optimizer, data = make()
    with pytest.raises(LoopError, match="no `max_per_rank` on the CPU, .* such as `max_per_rank=256`"):
        find_batch_size(loop, model, optimizer, data, lambda model, batch: run_out(model, batch, 2))


def test_scale_lr_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    """Aloud, with the rule and where it is from: nobody is to find a learning rate that they did not set."""
    assert scale_lr(0.1, 2048, 256) == pytest.approx(0.8)
    assert capsys.readouterr().out == (
        "learning rate 0.1 for batches of 256 becomes 0.8 for 2,048 "
        "(the linear rule of Goyal et al. 2017, for SGD; warm up over the first epochs)\n"
    )
    said: list[str] = []
    assert scale_lr(1e-3, 64, 256, "sqrt", say=said.append) == pytest.approx(5e-4)
    assert "becomes 0.0005 for 64 (the square-root rule of Krizhevsky 2014" in said[0]


def test_scale_lr_is_silent_on_other_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The value is the same on every rank, the sentence comes from rank 0."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in {**variables, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert scale_lr(0.1, 512, 256) == pytest.approx(0.2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((0.1, 0, 256), "batch sizes of 0 and 256"),
        ((-1.0, 1, 256), "`lr` is -1.0"),
        ((float("inf"), 1, 256), "`lr` is inf"),
        ((0.1, 1, 2, "cubic"), "`rule` is 'cubic'. Use 'linear' or 'sqrt'"),
    ],
)
def test_scale_lr_refuses_what_makes_no_sense(arguments: Any, found: str) -> None:
    """With the value."""
    with pytest.raises(LoopError, match=found):
        scale_lr(*arguments)
