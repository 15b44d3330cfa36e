# SPDX-License-Identifier: Apache-2.0
"""Gradients are cleared as the optimizer clears them; and a state that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from ddpilot import FakeGroup
from ddpilot.training.models.optimizers import clear_gradients, share_state


class Own(torch.optim.SGD):
    """Counts how often it is asked."""

    num_asked = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch does it."""
        self.num_asked += 1
        super().zero_grad(set_to_none)


@pytest.mark.usefixtures("compiler_is_loaded")
def test_clear_gradients_leaves_none() -> None:
    """In all groups of torch's own optimizers; one that clears them in its own way is asked to, a patched one too."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": [parameter]} for parameter in parameters]
    asked = []
    own, patched = Own(groups), torch.optim.SGD(groups)
    patched.zero_grad = lambda set_to_none=True: asked.append(set_to_none)  # type: ignore[method-assign]
    for optimizer in (torch.optim.SGD(groups), own):
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        clear_gradients(optimizer)
        assert [parameter.grad for parameter in parameters] == [None, None]
    clear_gradients(patched)
    assert (own.num_asked, asked) == (1, [True])


@dataclass(frozen=True)
class Replaying(FakeGroup):
    """Rank 0 records what it sends, and rank 1 receives that; some rank has a state."""

    sent: list[Any] = field(default_factory=list)

    def all_reduce(self, tensor: torch.Tensor, op: Any = "sum") -> torch.Tensor:
        """The flag."""
        assert op == "max"
        return tensor.fill_(1)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Bytes."""
        if self.rank == src:
            self.sent.append(tensor.clone())
            return tensor
        return tensor.copy_(self.sent.pop(0))

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Outlines."""
        if self.rank == src:
            self.sent.append(value)
            return value
        return self.sent.pop(0)


def train(make: Any, lr: float, num_steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after steps of its own."""
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters(), lr=lr)
    for _ in range(num_steps):
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step(lambda: model(torch.ones(1, 2)).square().sum())
    return model, optimizer


@pytest.mark.usefixtures("compiler_is_loaded")
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.LBFGS])
@pytest.mark.parametrize(("zeros", "ones"), [(2, 3), (2, 0), (0, 2)])
def test_share_state_gives_each_rank_the_state_and_options_of_rank_0(make: Any, zeros: int, ones: int) -> None:
    """Also lists of tensors; a rank without a state gets one, and one that rank 0 lacks is dropped."""
    sent: list[Any] = []
    (_, first), (other, second) = train(make, 0.1, zeros), train(make, 0.2, ones)
    parameters = list(other.parameters())
    share_state(first, Replaying(0, 2, sent=sent))
    share_state(second, Replaying(1, 2, sent=sent))
    assert sent == []
    assert str(first.state_dict()) == str(second.state_dict())
    assert second.param_groups[0]["params"] == parameters


class Counting(torch.optim.SGD):
    """Counts its steps under a key of its state that is not a parameter, which torch's `state_dict` keeps, too."""

    def step(self, closure: Any = None) -> Any:
        """One step."""
        state: Any = self.state
        state["all"] = {"step": state.get("all", {"step": 0})["step"] + 1, "norm": torch.ones(1)}
        return super().step(closure)


@pytest.mark.usefixtures("compiler_is_loaded")
def test_share_state_keeps_what_belongs_to_no_parameter() -> None:
    """The ranks would otherwise compute different updates, or raise a KeyError."""
    sent: list[Any] = []
    (_, first), (_, second) = train(Counting, 0.1, 2), train(Counting, 0.1, 3)
    share_state(first, Replaying(0, 2, sent=sent))
    share_state(second, Replaying(1, 2, sent=sent))
    state: Any = second.state
    assert state["all"] == {"step": 2, "norm": torch.ones(1)}


@pytest.mark.usefixtures("compiler_is_loaded")
def test_share_state_leaves_options_that_cannot_be_pickled() -> None:
    """A function that a program keeps in a group, for example."""
    sent: list[Any] = []
    (_, first), (_, second) = train(torch.optim.Adam, 0.1, 2), train(torch.optim.Adam, 0.2, 3)
    functions = [lambda: 0, lambda: 1]
    for optimizer, function in zip((first, second), functions, strict=True):
        optimizer.param_groups[0]["scale"] = function
    share_state(first, Replaying(0, 2, sent=sent))
    assert "lambda" not in str(sent)
    share_state(second, Replaying(1, 2, sent=sent))
    assert (second.param_groups[0]["lr"], second.param_groups[0]["scale"]) == (0.1, functions[1])
