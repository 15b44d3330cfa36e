# SPDX-License-Identifier: Apache-2.0
"""Read the source around a line: lists that are averaged, tensors that are scaled, gradients that are read."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpilot.guard.probes.caller_source import is_averaged, is_scaled_later, reads_gradients

NAME = "<a cell>"


@pytest.fixture
def forgets_the_source() -> Iterator[None]:
    """Nothing remains installed."""
    yield
    linecache.cache.pop(NAME, None)


@pytest.mark.usefixtures("forgets_the_source")
@pytest.mark.parametrize(
    ("after", "averages"),
    [
        ("sum(them) / k", True),
        ("np.mean(them)", True),
        ("torch.tensor(them).mean()", True),
        ("torch.tensor(them).mean() if k else None", True),
        ("sum(m[key] for m in them) / len(them)", True),
        ("np.mean([m['accuracy'] for m in them])", True),
        ("sum(m.accuracy for m in them)", True),
        ("them.mean()", True),
        ("all_of_them = torch.cat(them)\n    all_of_them.mean()", True),
        ("all_of_them = torch.cat(them)\n    (all_of_them * weights).sum()", False),
        ("print(them)", False),
        ("sum(m['accuracy'] * m['n'] for m in them)", False),
        ("sum(m['accuracy'] for m in them if m)", False),
        ("sum(other['accuracy'] for m in them)", False),
        ("sum(one * n for one, n in zip(them, ns))", False),
        ("np.average(others)", False),
        ("max(them)", False),
    ],
)
@pytest.mark.parametrize(
    "call", ["gather(them, 1)", "gather(object_list=them, obj=1)", "gather(them if k else None, 1)"]
)
def test_is_averaged_is_said_where_the_list_is_taken_as_it_is(call: str, after: str, averages: bool) -> None:
    """Its sum or its mean; not if it is weighted or displayed."""
    said: list[bool] = []

    def gather(*_: Any, **__: Any) -> None:
        said.append(is_averaged(sys._getframe(1), "gather", 0, "object_list"))

    source = f"def evaluate(them):\n    {call}\n    return\n    {after}\n\nevaluate([])"
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    exec(compile(source, NAME, "exec"), {"gather": gather, "k": 2})
    assert said == [averages]


@pytest.mark.usefixtures("forgets_the_source")
@pytest.mark.parametrize(
    ("source", "is_scaled"),
    [
        ("reduce(x, 'avg')\nx * world / total", True),
        ("reduce(x, op='avg')\nx /= total", True),
        ("reduce(tensor=x)\nx.div_(total)", True),
        ("reduce(s.x)\nprint(s.x.item() * world)", True),
        ("def mean(t):\n    reduce(t)\n    return t\ny = mean(x)\ny * world", True),
        ("def mean(t):\n    reduce(t)\n    return t\nmean(x) * world", True),
        ("x = x / total\nreduce(x)\nprint(x)", False),
        ("reduce(x)\n100 * x.item()\nx.mul(100)", False),
        ("def mean(t):\n    reduce(t)\n    return t\nprint(mean(x / total))", False),
    ],
)
def test_is_scaled_later_is_said_of_what_is_no_mean_yet(source: str, is_scaled: bool) -> None:
    """In the same function, and for the result in a caller; a percentage is a mean."""
    said: list[bool] = []

    def reduce(*_: Any, **__: Any) -> None:
        said.append(is_scaled_later(sys._getframe(1), "reduce", "tensor"))

    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    one = torch.ones(())
    known: dict[str, Any] = {"reduce": reduce, "x": one, "s": SimpleNamespace(x=one), "world": 2, "total": 4}
    exec(compile(source, NAME, "exec"), known)
    assert said == [is_scaled]


@pytest.mark.usefixtures("forgets_the_source")
@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("for _ in tasks:\n    look()\n    [p.grad for p in []]", True),
        ("def micro():\n    look()\n    [p.grad for p in []]\n\nfor _ in tasks:\n    micro()", True),
        ("for _ in tasks:\n    look()\n    p.grad = None", False),
        ("for _ in tasks:\n    look()\n    autograd.grad(1)", False),
        ("for _ in tasks:\n    look()\n[p.grad for p in []]", False),
    ],
)
def test_reads_gradients_is_said_of_the_loop_around_the_backward(source: str, reads: bool) -> None:
    """Not of later code, nor of functions with that name."""
    said: list[bool] = []
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    known: dict[str, Any] = {"tasks": "a", "p": SimpleNamespace(), "autograd": SimpleNamespace(grad=str)}
    exec(compile(source, NAME, "exec"), known | {"look": lambda: said.append(reads_gradients(sys._getframe(1)))})
    assert said == [reads]
