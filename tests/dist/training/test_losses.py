# SPDX-License-Identifier: Apache-2.0
"""Losses that are means over different things, that compare samples, or that leave outputs out: as one process has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import TensorDataset

from ddpilot import RankError
from ddpilot.data.global_batches import Plan
from ddpilot.errors import LoopError
from ddpilot.group.init_group import seed_all
from ddpilot.training.loop import Loop
from ddpilot.training.loss_weights import NUM_COUNTS
from ddpilot.training.models.ddp import run_in_forward, unwrap
from tests.dist.training.bodies import launch
from tests.soak import often

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 25, 8, 2
"""The last batch has one sample: all ranks but one have none."""


def make_data() -> TensorDataset:
    """Inputs, targets, and labels of which -1 is none; those of the last sample in order have none."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(NUM_SAMPLES, 1, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
    labels[torch.arange(NUM_SAMPLES) % 3 != 0] = -1
    return TensorDataset(x, y, labels)


class TwoHeads(nn.Module):
    """Two outputs of one trunk, and a third that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.value, self.label = nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: (samples, 6)."""
        hidden = torch.tanh(self.trunk(x))
        return self.value(hidden), self.label(hidden)


Backward = Callable[[Loop | None, nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]
"""The backward pass of a batch; None for plain PyTorch. Returns a loss that is a mean over samples."""


def two_means(loop: Loop | None, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A mean over samples and one over labels, which is NaN where there are none."""
    x, y, labels = batch
    value, scores = model(x)
    loss, other = mse_loss(value, y), cross_entropy(scores, labels, ignore_index=-1)
    num = int((labels >= 0).sum())
    if loop is not None:
        loop.backward({"value": loss, "label": (other, num)})
    else:
        (loss + other if num else loss).backward()  # type: ignore[no-untyped-call]
    return loss


def compare_samples(loop: Loop | None, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """InfoNCE: the hidden state of each sample against the targets of all."""
    x, y, _ = batch
    _, scores = model(x)
    keys = normalize(torch.cat([y, y**2, 1 - y], dim=1), dim=1) + 0 * scores
    all_keys, first = (keys, 0) if loop is None else loop.gather_batch(keys * (1 + scores))
    all_keys = all_keys * (1 + scores) if loop is None else all_keys
    loss = cross_entropy(normalize(scores, dim=1) @ all_keys.T, first + torch.arange(len(x)))
    loss.backward() if loop is None else loop.backward(loss)  # type: ignore[no-untyped-call]
    return loss


def compare_labelled(loop: Loop | None, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Labelled samples against all; ranks without any are compared with by others."""
    x, _, labels = batch
    value, scores = model(x)
    rows = torch.cat([value, scores], dim=1)
    num = (labels >= 0).sum()
    keys = rows if loop is None else loop.gather_batch(rows)[0]
    loss = ((rows @ keys.T).square().mean(1) * (labels >= 0)).sum() / num
    if loop is not None:
        loop.backward(loss, count=num.item())
    else:
        (loss if num else rows.sum() * 0).backward()  # type: ignore[no-untyped-call]
    return rows.mean()


def compare_labelled_by_name(loop: Loop | None, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The same beside a mean over samples."""
    x, y, labels = batch
    value, scores = model(x)
    num = (labels >= 0).sum()
    keys = scores if loop is None else loop.gather_batch(scores)[0]
    loss, other = mse_loss(value, y), ((scores @ keys.T).square().mean(1) * (labels >= 0)).sum() / num
    if loop is not None:
        loop.backward({"value": loss, "label": (other, num)})
    else:
        (loss + (other if num else 0 * scores.sum())).backward()
    return loss


def leave_out_a_head(loop: Loop | None, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Only one of two outputs is used."""
    x, y, _ = batch
    value, _ = model(x)
    loss = mse_loss(value, y)
    loss.backward() if loop is None else loop.backward(loss)  # type: ignore[no-untyped-call]
    return loss


CASES: list[tuple[Backward, dict[str, Any], dict[str, Any]]] = [
    (two_means, {}, {}),
    (two_means, {"find_unused_parameters": True}, {}),
    (two_means, {"static_graph": True}, {"check_finite": False}),
    (compare_samples, {"find_unused_parameters": True}, {}),
    (compare_labelled, {}, {}),
    (compare_labelled, {}, {"check_finite": False}),
    (compare_labelled_by_name, {}, {}),
    (leave_out_a_head, {"find_unused_parameters": True}, {}),
    (leave_out_a_head, {"find_unused_parameters": True}, {"check_finite": False}),
]


def train_plain(backward: Backward) -> tuple[list[float], torch.Tensor]:
    """Losses and weights of plain PyTorch."""
    seed_all(0)
    model = TwoHeads().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, losses = make_data(), []
    plan = Plan(num_samples=NUM_SAMPLES, global_batch_size=BATCH_SIZE, world_size=1, shuffle=True)
    for epoch in range(NUM_EPOCHS):
        for ids in torch.as_tensor(plan.order(epoch).copy()).split(BATCH_SIZE):  # type: ignore[no-untyped-call]
            losses.append(backward(None, model, data[ids]).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def train_all_plain() -> list[tuple[list[float], torch.Tensor]]:
    """All cases in plain PyTorch."""
    return [train_plain(backward) for backward, _, _ in CASES]


def train_all() -> list[tuple[list[float], torch.Tensor]]:
    """All cases on this rank."""
    return [train(*case) for case in CASES]


def train(backward: Backward, ddp: dict[str, Any], options: dict[str, Any]) -> tuple[list[float], torch.Tensor]:
    """The same with a `Loop`."""
    loop = Loop(progress=False, **options)
    inner = TwoHeads().double()
    model, optimizer = loop.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1), **ddp)
    loader = loop.loader(make_data(), global_batch_size=BATCH_SIZE, shuffle=True)
    losses = []
    for _ in loop.epochs(NUM_EPOCHS):
        for batch in loop.batches(loader):
            with loop.accumulate(model):
                loss = backward(loop, model, batch)
            loop.step(optimizer)
            losses.append(loop.reduce(loss).item())
    return losses, torch.cat([one.detach().reshape(-1) for one in unwrap(model).parameters()])


@often("3")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_losses_train_as_in_one_process(num_ranks: int) -> None:
    """Several counts, comparisons over the batch, unused outputs; batches in which all ranks but one have no sample."""
    (expected,) = launch(1, train_all_plain)
    for ranks in launch(num_ranks, train_all):
        for (losses, weights), (plain_losses, plain_weights), case in zip(ranks, expected, CASES, strict=True):
            name = f"{case[0].__name__} {case[1]} {case[2]}"
            assert losses == pytest.approx(plain_losses, rel=1e-10), name
            assert torch.allclose(weights, plain_weights, rtol=1e-10, atol=1e-12), name


def refuse(loop: Loop, call: Callable[[], object]) -> str:
    """What `call` raises."""
    with pytest.raises(LoopError) as caught:
        call()
    return str(caught.value)


def misuse() -> list[str]:
    """What is refused on this rank: other names, more losses, rows that do not fit, a forward with two backwards."""
    loop = Loop(progress=False)
    model = loop.prepare(TwoHeads().double())
    rows = torch.ones(loop.rank, 3 + loop.rank)
    said = [refuse(loop, lambda: loop.gather_batch(rows))]
    for x, y, labels in loop.batches(loop.loader(make_data(), global_batch_size=BATCH_SIZE)):
        value, scores = model(x)
        loss, other = mse_loss(value, y), cross_entropy(scores, labels.clamp(min=0))
        named = {"value": loss, "label": (other, 1)} if loop.rank else {"value": loss}
        said.append(refuse(loop, lambda named=named: loop.backward(named)))  # type: ignore[misc]
        many = {str(number): (loss, 1) for number in range(NUM_COUNTS + loop.rank)}
        said.append(refuse(loop, lambda many=many: loop.backward(many)))  # type: ignore[misc]
        loop.backward(loss + other, retain_graph=True)
        said.append(refuse(loop, lambda other=other: loop.backward(other)))  # type: ignore[misc]
        break
    return [*said, *misuse_of_forwards()]


def misuse_of_forwards() -> list[str]:
    """Two forward passes and then two backward passes; alternating ones, and two parts of one forward, are fine."""
    loop = Loop(progress=False)
    model = loop.prepare(TwoHeads().double())
    parts = loop.prepare(nn.ModuleDict({"a": nn.Linear(6, 1), "b": nn.Linear(6, 1)}).double())
    for x, y, labels in loop.batches(loop.loader(make_data(), global_batch_size=BATCH_SIZE)):
        for shift in (0.0, 1.0):
            value, scores = model(x + shift)
            loop.backward(mse_loss(value, y) + cross_entropy(scores, labels.clamp(min=0)))
        first, second = run_in_forward(parts, lambda inner, x=x: (inner["a"](x), inner["b"](x)))  # type: ignore[misc]
        loop.backward(first.mean())
        loop.backward(second.mean())
        (value, scores), (later, _) = model(x), model(-x)
        loop.backward(value.mean() + scores.mean())
        return [refuse(loop, lambda later=later: loop.backward(later.mean()))]  # type: ignore[misc]
    return []


def test_ranks_that_do_not_fit_together_are_refused_on_all_of_them() -> None:
    """Before the backward pass, with what this rank has."""
    for rank, (rows, names, numbers, twice, later) in enumerate(launch(2, misuse)):
        assert "ran before another loop.backward(), which all-reduced" in later
        assert f"(*, {3 + rank})" in rows
        assert "the ranks have different losses: 'value'" in names
        assert ("'8' here" if rank else "'7' here") in numbers
        assert "call backward once" in twice


def lose_a_number(shows_nan: bool) -> None:
    """A NaN in one of several losses of one rank, in a batch where another has none of that kind."""
    loop = Loop(progress=False)
    model = loop.prepare(TwoHeads().double())
    for x, y, labels in loop.batches(loop.loader(make_data(), global_batch_size=BATCH_SIZE)):
        value, scores = model(x)
        other = cross_entropy(scores, labels.clamp(min=0)) * (float("nan") if shows_nan and loop.rank else 1.0)
        loop.backward({"value": mse_loss(value, y), "label": (other, loop.rank)})


def test_a_loss_of_several_that_is_nan_is_named() -> None:
    """On all ranks alike, with the rank, the name and the batch."""
    launch(2, lose_a_number, False)
    with pytest.raises(RankError, match=r"on rank 1 the loss 'label' is nan in epoch 0, batch 0"):
        launch(2, lose_a_number, True)
