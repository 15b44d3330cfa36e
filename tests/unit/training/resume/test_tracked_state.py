# SPDX-License-Identifier: Apache-2.0
"""What a run saves comes back into what it came from, and into nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddpilot import FakeGroup, LoopError, MismatchedCheckpointError, load_weights
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.format import Checkpoint
from ddpilot.checkpoint.manifest import RunProgress
from ddpilot.training.resume.tracked_state import TrackedState

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")


class Counter:
    """Something of the user's."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        """Its count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the count."""
        self.count = state["count"]


class WithExtras(nn.Module):
    """A model with a complex buffer and extra state: what safetensors cannot hold."""

    def __init__(self, note: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
        self.note = note

    def get_extra_state(self) -> dict[str, str]:
        """The note."""
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        """Take the note."""
        self.note = state["note"]


def save(folder: Path, *added: Any, **named: Any) -> Checkpoint:
    """A checkpoint of things that were added in this order."""
    things = collect(*added, **named)
    weights, state, _ = things.collect(FakeGroup())
    with CheckpointDir(folder) as directory:
        directory.save(RunProgress(step=1), weights=weights, state=state)
    found = directory.latest()
    assert found is not None
    return found


def collect(*added: Any, **named: Any) -> TrackedState:
    """TrackedState that were added in this order."""
    things = TrackedState()
    for thing in added:
        things.add(thing)
    for name, thing in named.items():
        things.add(thing, name)
    return things


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With a state."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def test_things_come_back_as_they_were(tmp_path: Path) -> None:
    """Several models of one kind, an average, an optimizer, a schedule, and what the user named."""
    first, other = nn.Linear(2, 2), nn.Linear(2, 2)
    second = torch.compile(other, backend="eager")
    average = AveragedModel(first)
    optimizer = adam(first)
    average.update_parameters(first)
    average.update_parameters(first)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    schedule.step()
    found = save(tmp_path, first, second, average, optimizer, schedule, seen=Counter(7))
    assert set(found.manifest.files) >= {"model.safetensors", "model2.safetensors", "averaged.safetensors"}

    new = nn.Linear(2, 2), nn.Linear(2, 2)
    new_average, new_optimizer, counter = AveragedModel(new[0]), torch.optim.Adam(new[0].parameters()), Counter()
    new_schedule = torch.optim.lr_scheduler.StepLR(new_optimizer, 1)
    collect(*new, new_average, new_optimizer, new_schedule, seen=counter).match(found, FakeGroup())()
    assert torch.equal(new[0].weight, first.weight)
    assert torch.equal(new[1].weight, other.weight)
    assert torch.equal(new_average.module.get_parameter("weight"), average.module.get_parameter("weight"))
    assert new_average.n_averaged.item() == 2
    before, after = optimizer.state[first.weight], new_optimizer.state[new[0].weight]
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert (new_schedule.get_last_lr(), counter.count) == (schedule.get_last_lr(), 7)
    alone = nn.Linear(2, 2)
    load_weights(alone, tmp_path, name="averaged")
    assert torch.equal(alone.weight, average.module.get_parameter("weight"))


def test_what_safetensors_cannot_hold_comes_back_too(tmp_path: Path) -> None:
    """Extra state of a module and complex buffers."""
    model = WithExtras("learnt")
    model.get_buffer("phase").fill_(1j)
    found = save(tmp_path, model)
    new = WithExtras()
    collect(new).match(found, FakeGroup())()
    assert new.note == "learnt"
    assert torch.equal(new.get_buffer("phase"), model.get_buffer("phase"))
    assert torch.equal(new.layer.weight, model.layer.weight)


def test_match_refuses_what_does_not_fit_and_changes_nothing(tmp_path: Path) -> None:
    """Each with what is there and what is wanted."""
    model = nn.Linear(2, 2)
    found = save(tmp_path, model, adam(model), seen=Counter(7))
    wrong: list[tuple[list[Any], dict[str, Any], str]] = [
        ([nn.Linear(3, 2)], {"seen": Counter()}, r"'optimizer', which this run lacks"),
        ([nn.Linear(2, 2)], {"optimizer": adam(model), "new": Counter()}, "it lacks 'new'; it has 'seen', which"),
        ([wide := nn.Linear(2, 3), adam(wide)], {"seen": Counter()}, r"weight \(2, 2\) where the model has \(3, 2\)"),
        ([nn.Sequential(nn.Linear(2, 2)), adam(model)], {"seen": Counter()}, "2 missing: 0.weight, 0.bias; 2 unexp"),
        ([nn.Linear(2, 2), torch.optim.SGD(model.parameters())], {"seen": Counter()}, "was a Adam and is a SGD"),
        ([nn.Linear(2, 2), torch.optim.Adam([model.weight])], {"seen": Counter()}, "2 parameters, .* have 1"),
    ]
    for added, named, said in wrong:
        before = {name: value.clone() for name, value in added[0].state_dict().items()}
        with pytest.raises(MismatchedCheckpointError, match=said):
            collect(*added, **named).match(found, FakeGroup())()
        assert all(torch.equal(before[name], value) for name, value in added[0].state_dict().items()), said


def test_add_names_renames_and_refuses() -> None:
    """The same thing has one name; two things have two."""
    things = TrackedState()
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    for thing in (model, other, model):
        things.add(thing)
    things.add(other, "critic")
    assert list(things.collect(FakeGroup())[0]) == ["model", "critic"]
    with pytest.raises(LoopError, match="a second 'critic'"):
        things.add(Counter(), "critic")
    with pytest.raises(LoopError, match="the name 'größe'. Use letters"):
        things.add(Counter(), "größe")
    with pytest.raises(LoopError, match="a list. Pass objects with `state_dict` and `load_state_dict`"):
        things.add([model])
