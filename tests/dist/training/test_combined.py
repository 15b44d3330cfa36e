# SPDX-License-Identifier: Apache-2.0
"""Several loaders in one pass: the numbers of plain PyTorch on 1, 2 and 3 ranks, also resumed at another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot.data.global_batches import Plan
from ddpilot.group.init_group import seed_all
from ddpilot.training.combined import _REPEAT, CombinedLoader
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap
from tests.dist.training.bodies import launch
from tests.soak import often

NUM_EPOCHS, SIZES, LENGTHS = 2, (4, 5), (10, 27)
"""Last batches of two samples: one rank of three has none, of one loader."""
CASES: dict[str, dict[str, Any]] = {
    "shortest": {},
    "longest": {"ends": "longest"},
    "accumulated": {"ends": "longest", "accumulate": 2},
    "weighted": {"weights": [1, 3], "accumulate": 2},
    "weighted_longest": {"weights": [2.0, 1.0], "ends": "longest"},
}


def make_data() -> list[TensorDataset]:
    """Labelled and unlabelled samples."""
    x = torch.linspace(-1, 1, 6 * 40, dtype=torch.float64).reshape(6, 40).t().contiguous()
    labelled, unlabelled = x[: LENGTHS[0]], x[-LENGTHS[1] :]
    return [TensorDataset(labelled, labelled.sum(1, keepdim=True).sin()), TensorDataset(unlabelled)]


def make_model() -> nn.Module:
    """A small network in float64."""
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def first_loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of labelled samples."""
    return nn.functional.mse_loss(model(x), y)


def second_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Of unlabelled samples."""
    output: torch.Tensor = model(x)
    return 0.3 * output.square().mean()


def batches_of(index: int, epoch: int) -> list[torch.Tensor]:
    """The samples of each batch of a loader, in plain PyTorch."""
    plan = Plan(num_samples=LENGTHS[index], global_batch_size=SIZES[index], world_size=1, shuffle=True)
    ids = torch.as_tensor(plan.order(epoch).copy())
    return list(ids.split(SIZES[index]))  # type: ignore[no-untyped-call]


def plain_epoch(epoch: int, ends: str = "shortest", weights: Any = None) -> list[tuple[Any, Any]]:
    """The samples of both data sets in each batch of an epoch; None where a loader has no part in it."""
    lengths = [len(batches_of(index, epoch)) for index in (0, 1)]

    def part(index: int, number: int) -> torch.Tensor:
        again, place = divmod(number, lengths[index])
        return batches_of(index, epoch + (again << _REPEAT))[place]

    if weights is None:
        num = max(lengths) if ends == "longest" else min(lengths)
        return [(part(0, number), part(1, number)) for number in range(num)]
    loop = Loop(progress=False)
    loaders = [loop.loader(data, global_batch_size=size) for data, size in zip(make_data(), SIZES, strict=True)]
    draws = CombinedLoader(loaders, weights=weights, seed=0)._draw(epoch)
    used, found = [0, 0], list[tuple[Any, Any]]()
    for source in draws:
        is_over = [num >= length for num, length in zip(used, lengths, strict=True)]
        if all(is_over) if ends == "longest" else is_over[source]:
            return found
        found.append((part(0, used[0]), None) if source == 0 else (None, part(1, used[1])))
        used[source] += 1
    raise AssertionError("the draws never end")


def plain(case: str) -> tuple[list[float], torch.Tensor]:
    """Losses and weights of plain PyTorch."""
    options = dict(CASES[case])
    accumulate = options.pop("accumulate", 1)
    seed_all(0)
    model, (labelled, unlabelled) = make_model(), make_data()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.02), []
    for epoch in range(NUM_EPOCHS):
        steps = plain_epoch(epoch, **options)
        for start in range(0, len(steps), accumulate):
            group = steps[start : start + accumulate]
            totals = [sum(len(each[index]) for each in group if each[index] is not None) for index in (0, 1)]
            if options.get("weights"):
                totals = [sum(totals)] * 2
            loss = torch.zeros((), dtype=torch.float64)
            for first, second in group:
                if first is not None:
                    loss = loss + first_loss(model, *labelled[first]) * len(first) / totals[0]
                if second is not None:
                    loss = loss + second_loss(model, *unlabelled[second]) * len(second) / totals[1]
            losses.append(loss.item())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return losses, nn.utils.parameters_to_vector(model.parameters()).detach()


def with_loop(case: str, folder: Path | None = None, stop_after: int | None = None) -> tuple[list[float], torch.Tensor]:
    """The same with a loop; `stop_after`: the update after which all ranks stop."""
    options = dict(CASES[case])
    loop = Loop(accumulate=options.pop("accumulate", 1), checkpoint_dir=folder, progress=False)
    model = loop.prepare(make_model())
    optimizer = loop.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    loaders = [
        loop.loader(data, global_batch_size=size, shuffle=True) for data, size in zip(make_data(), SIZES, strict=True)
    ]
    objective, losses = loop._updates.keep_objective(), []
    for _ in loop.epochs(NUM_EPOCHS):
        for batch in loop.batches(*loaders, **options):
            assert loop.batch is not None
            with loop.accumulate(model):
                if "weights" not in options:
                    (x, y), (more,) = batch
                    assert [part.count for part in loop.batch.parts] == [len(x), len(more)]
                    # One forward pass: DDP counts them.
                    output = model(torch.cat([x, more]))
                    loss = nn.functional.mse_loss(output[: len(x)], y), 0.3 * output[len(x) :].square().mean()
                    loop.backward(loss)
                elif loop.batch.source:
                    loop.backward(second_loss(model, *batch))
                else:
                    loop.backward(first_loss(model, *batch))
            if loop.is_update:
                losses.append(objective.reduce().item())
            loop.step(optimizer)
            if loop.num_updates == stop_after:
                loop.stop(everywhere=True)
    return losses, nn.utils.parameters_to_vector(unwrap(model).parameters()).detach()


def plain_all() -> dict[str, tuple[list[float], torch.Tensor]]:
    """Every case."""
    return {case: plain(case) for case in CASES}


def with_loop_all() -> dict[str, tuple[list[float], torch.Tensor]]:
    """Every case."""
    return {case: with_loop(case) for case in CASES}


def stopped_all(folder: Path, updates: dict[str, int | None]) -> dict[str, tuple[list[float], torch.Tensor]]:
    """Every case, up to an update of its own, or from there on to the end."""
    return {case: with_loop(case, folder / case, stop) for case, stop in updates.items()}


@pytest.fixture(scope="module")
def expected() -> Any:
    """What plain PyTorch gives, in a process of its own."""
    return launch(1, plain_all)[0]


@pytest.mark.timeout(100)
@often("3")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_combined_loaders_train_as_in_plain_pytorch(num_ranks: int, expected: Any) -> None:
    """Losses and weights in each way to combine them, and with accumulation."""
    for found in launch(num_ranks, with_loop_all):
        for case, (losses, weights) in expected.items():
            assert found[case][0] == pytest.approx(losses, rel=1e-10), case
            torch.testing.assert_close(found[case][1], weights, rtol=1e-10, atol=1e-12, msg=case)


@pytest.mark.timeout(100)
@often("2-3")
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_combined_loaders_resume_in_the_middle_of_an_epoch(
    tmp_path: Path, before: int, after: int, expected: Any
) -> None:
    """At another number of ranks: the losses and weights of a run that was not stopped."""
    stops = {case: min(len(losses) - 1, len(losses) // 2 + 2) for case, (losses, _) in expected.items()}
    first = launch(before, stopped_all, tmp_path, stops)[0]
    second = launch(after, stopped_all, tmp_path, dict.fromkeys(CASES))[0]
    for case, (losses, weights) in expected.items():
        assert len(first[case][0]) == stops[case]
        assert [*first[case][0], *second[case][0]] == pytest.approx(losses, rel=1e-10), case
        torch.testing.assert_close(second[case][1], weights, rtol=1e-10, atol=1e-12, msg=case)
