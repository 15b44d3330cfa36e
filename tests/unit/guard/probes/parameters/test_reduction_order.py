# SPDX-License-Identifier: Apache-2.0
"""Note the order of gradients that a program all-reduces itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

from ddpilot.guard.hook import install
from ddpilot.record.journal import read_journal

PROBES = ("ddpilot.guard.probes.parameters.reduction_order:ReducedOrderProbe",)

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Replaces the default group, which has one rank."""

    def end() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def replace() -> None:
        end()
        (tmp_path / "store").unlink(missing_ok=True)
        dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)

    yield replace
    end()


@pytest.fixture
def noted(tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Returns what the probe has noted."""
    stop = install(tmp_path / "j", rank=0, probes=PROBES, report=pytest.fail)
    yield lambda: [
        dict(entry.values) for entry in read_journal(tmp_path / "j").entries if entry.kind == "reduction_order"
    ]
    stop()


def make_gradients() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A model after a backward pass."""
    model = nn.Linear(2, 1)
    loss: Any = model(torch.ones(1, 2)).sum()
    loss.backward()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """It has one."""
    assert parameter.grad is not None
    return parameter.grad


def test_groups_of_the_same_ranks_are_told_apart(
    begin: Callable[[], None], noted: Callable[[], list[dict[str, Any]]]
) -> None:
    """Each group has its own order, and its first step is number 1 in any order of arrival."""
    begin()
    groups = [dist.new_group([0]), dist.new_group([0])]
    model, optimizer = make_gradients()
    for group, parameter in zip(groups, model.parameters(), strict=True):
        dist.all_reduce(gradient_of(parameter), group=group)
    optimizer.step()
    first, second = noted()
    assert [first["order"], second["order"]] == [["model.weight"], ["model.bias"]]
    assert first["key"][1] != second["key"][1]
    assert [first["key"][2], second["key"][2]] == [1, 1]


def test_the_default_group_has_one_name(begin: Callable[[], None], noted: Callable[[], list[dict[str, Any]]]) -> None:
    """Passed or not, or not created yet: a session creates it in the first collective."""
    model, optimizer = make_gradients()
    with pytest.raises(ValueError, match="not been initialized"):
        dist.all_reduce(torch.ones(1))
    begin()
    dist.all_reduce(gradient_of(model.weight))
    dist.all_reduce(gradient_of(model.bias), group=dist.group.WORLD)
    optimizer.step()
    (only,) = noted()
    assert only["order"] == ["", "model.weight", "model.bias"]


def test_nothing_of_an_earlier_default_group_is_kept(
    begin: Callable[[], None], noted: Callable[[], list[dict[str, Any]]]
) -> None:
    """Its steps and calls are not counted: a different rank may have left it a step, or a call, earlier."""
    model, optimizer = make_gradients()
    begin()
    dist.all_reduce(gradient_of(model.bias))
    optimizer.step()
    dist.all_reduce(gradient_of(model.bias))
    begin()
    dist.all_reduce(gradient_of(model.weight))
    optimizer.step()
    before, after = noted()
    assert before["key"][0] != after["key"][0]
    assert [before["key"][2], after["key"][2]] == [1, 1]
    assert after["order"] == ["model.weight"]
