# SPDX-License-Identifier: Apache-2.0
"""Find the line that calls a model past its DDP wrapper in the source."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from torch import Tensor, nn

from ddpilot.guard.probes.parameters.bypass import find_bypass_line


class Inner(nn.Module):
    """The model inside the wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = self.head(batch)
        return output

    def loss(self, batch: Any) -> Any:
        """A method that people call."""
        return batch


class Wrapper(nn.Module):
    """Stands for DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        """Not called here."""
        return batch


def by_module(model: Any, _inner: Any) -> FrameType:
    """The correct way."""
    model.module.state_dict()
    output = model.module(None) if model == 0 else 1  # here
    model.module.eval()
    return [sys._getframe(), output][0]  # type: ignore[return-value]


def by_method(model: Any, _inner: Any) -> FrameType:
    """A method that is not `forward`."""
    model(1)
    for _ in range(1):
        model.module.loss(2)  # here
    return sys._getframe()


def unwrap(model: Any) -> Any:
    """A helper that many projects have."""
    return getattr(model, "module", model)


def by_helper(model: Any, _inner: Any) -> FrameType:
    """Its result is known without calling it again."""
    if model == 0:
        unwrap(model).loss(2)  # here
    unwrap(model).state_dict()
    return sys._getframe()


def by_called_helper(model: Any, _inner: Any) -> FrameType:
    """The same, called at once."""
    if model == 0:
        unwrap(model)(2)  # here
    len([model])
    return sys._getframe()


def by_name(_model: Any, inner: Any) -> FrameType:
    """The old name."""
    print(inner.head) if inner == 0 else inner.loss(1)  # here
    return sys._getframe()


def by_part(model: Any, _inner: Any) -> FrameType:
    """A layer of the model."""
    if model == 0:
        model.module.head(3)  # here
    return sys._getframe()


def not_at_all(model: Any, inner: Any) -> FrameType:
    """Correct uses."""
    model(1)
    model.module.train()
    inner.state_dict()
    len(list(model.module.parameters()))
    return sys._getframe()


@pytest.mark.parametrize("program", [by_module, by_method, by_helper, by_called_helper, by_name, by_part, not_at_all])
def test_find_bypass_line_finds_the_call(program: Callable[[Any, Any], FrameType]) -> None:
    """By the objects that names refer to, not by the names; uses that do not train are ignored."""
    inner = Inner()
    wrapper = Wrapper(inner)
    frame = program(wrapper, inner)
    first = program.__code__.co_firstlineno
    with open(__file__) as file:
        lines = file.read().splitlines()
    marked = [number for number in range(first, frame.f_lineno + 1) if lines[number - 1].endswith("# here")]
    found = find_bypass_line(frame, wrapper)
    assert found == (marked[0] if marked else None)


def test_find_bypass_line_finds_nothing_where_there_is_no_source() -> None:
    """As in code typed at a prompt."""
    wrapper = Wrapper(Inner())
    names: dict[str, Any] = {"sys": sys, "inner": wrapper.module}
    exec("def f():\n    inner.loss(1)\n    return sys._getframe()", names)
    assert find_bypass_line(names["f"](), wrapper) is None
