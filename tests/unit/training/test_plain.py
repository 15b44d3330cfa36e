# SPDX-License-Identifier: Apache-2.0
"""Which attributes come back from a rank."""

from __future__ import annotations

from collections import deque
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ddpilot.training.plain import is_plain, plain_attributes


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, 1.5, "text", b"bytes", Path("file")),
        *([1, [2.0, "three"]], (1,), {1, 2}, {"a": {"b": torch.ones(2)}}, deque([1])),
        *(numpy.float64(1), numpy.ones(2), torch.ones(2), torch.float16, HTTPStatus.OK),
    ],
    ids=repr,
)
def test_is_plain_takes_numbers_texts_tensors_and_containers_of_them(value: Any) -> None:
    """They refer to nothing else, so setting them on the notebook's object is right."""
    assert is_plain(value)


@pytest.mark.parametrize(
    "value",
    [object(), [object()], {"key": len}, torch.nn.Linear(1, 1), torch.nn.Parameter(torch.ones(1)), len],
    ids=lambda value: type(value).__name__,
)
def test_is_plain_leaves_what_belongs_to_something(value: Any) -> None:
    """A copy of a module or a parameter would take the place of the one that the notebook's model has."""
    assert not is_plain(value)


def test_is_plain_leaves_tensors_with_a_graph_and_arrays_of_objects() -> None:
    """The one cannot travel with its graph, of the other nobody knows what it holds."""
    assert not is_plain(torch.ones(1, requires_grad=True) * 2)
    assert not is_plain(numpy.array([object()]))


def test_plain_attributes_are_those_of_the_object_itself() -> None:
    """Not its class's, and not what is no plain value."""

    class Owner:
        of_the_class = 1

        def __init__(self) -> None:
            self.losses, self.layer, self._count = [0.5], torch.nn.Linear(1, 1), 3

    assert plain_attributes(Owner()) == {"losses": [0.5], "_count": 3}
