# SPDX-License-Identifier: Apache-2.0
"""Names of an optimizer's parameters, from the variables of whoever calls it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from ddpilot.guard.probes.parameter_names import find_parameter_names

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")


class Program:
    """Has its module as an attribute."""

    def __init__(self) -> None:
        self.head = nn.Linear(2, 1)

    def names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """As found from here."""
        return list(find_parameter_names(optimizer, sys._getframe()).values())


class Proxy:
    """Stands for something that is not there."""

    @property
    def __class__(self) -> Any:
        """Nobody may ask."""
        raise RuntimeError("working outside of a context")

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise AssertionError


def test_names_are_those_of_variables_and_their_attributes() -> None:
    """Of the caller's caller too; what has none is left out, and what stands for something else is not asked."""
    body, program, proxy = nn.Linear(2, 2), Program(), Proxy()
    alone = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*body.parameters(), alone, *program.head.parameters()], lr=0.1)
    assert sorted(program.names(optimizer)) == ["body.bias", "body.weight", "head.bias", "head.weight"]
    assert find_parameter_names(optimizer, None) == {}
    assert type(proxy) is Proxy


@pytest.mark.skipif(torch.__version__ < "2.6", reason="optimizers know no names")
def test_names_that_an_optimizer_was_given_are_taken() -> None:
    """They are the module's own."""
    body = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(body.named_parameters(), lr=0.1)
    assert sorted(find_parameter_names(optimizer, None).values()) == ["bias", "weight"]
