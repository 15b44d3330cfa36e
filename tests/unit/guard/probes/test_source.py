# SPDX-License-Identifier: Apache-2.0
"""What the source says around a line: loops that accumulate, and learning rates that are divided."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from ddpilot.guard.probes.source import (
    divides_learning_rate,
    is_accumulating,
    is_averaged,
    is_scaled_later,
    reads_gradients,
)

NAME = "<a cell>"


@pytest.fixture
def forgets_the_source() -> Iterator[None]:
    """Nothing is left of what was run."""
    yield
    linecache.cache.pop(NAME, None)


def judge(source: str) -> tuple[bool, bool]:
    """What is said of `source` at its first ``look()``."""
    said: list[tuple[bool, bool]] = []

    def look() -> None:
        frame: FrameType = sys._getframe(1)
        said.append((is_accumulating(frame), divides_learning_rate(frame)))

    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    known: dict[str, Any] = {"look": look, "optimizer": Optimizer(), "tasks": "ab", "k": 2}
    exec(compile(source, NAME, "exec"), known)
    return said[0]


class Optimizer:
    """Steps."""

    def step(self) -> None:
        """Nothing."""


@pytest.mark.usefixtures("forgets_the_source")
@pytest.mark.parametrize(
    ("source", "accumulates"),
    [
        ("for _ in range(3):\n    look()\noptimizer.step()", True),
        ("for _ in range(3):\n    for _ in range(2):\n        look()\n    optimizer.step()", True),
        ("def micro():\n    look()\n\nfor _ in range(3):\n    micro()\noptimizer.step()", True),
        ("for i, _ in enumerate(tasks):\n    look()\n    if (i + 1) % 2 == 0:\n        optimizer.step()", True),
        ("for i, _ in enumerate(tasks):\n    last = i % 2\n    look()\n    if last:\n        optimizer.step()", True),
        ("for _ in range(3):\n    look()\n    optimizer.step()", False),
        ("for i in range(3):\n    look()\n    optimizer.step()\n    i % 2", False),
        ("for task in tasks:\n    look()\noptimizer.step()", False),
        ("for i in range(4):\n    for task in tasks:\n        look()\n    if i % 2:\n        optimizer.step()", False),
        ("look()\noptimizer.step()", False),
    ],
)
def test_is_accumulating_is_said_of_loops_that_count_micro_batches(source: str, accumulates: bool) -> None:
    """Not of tasks or terms of a loss, nor where each round takes a step."""
    assert judge(source) == (accumulates, False)


@pytest.mark.usefixtures("forgets_the_source")
@pytest.mark.parametrize(
    ("source", "divides"),
    [
        ("dict(params=[], lr=0.1 / k)", True),
        ("base_lr = 0.1 / k", True),
        ("learning_rate: float = 0.1 / k", True),
        ("group = {'lr': 0.1}\ngroup['lr'] /= k", True),
        ("lr = 0.1 * k\nloss = 1 / k", False),
        ("clr = 1 / k", False),
    ],
)
def test_divides_learning_rate_is_said_wherever_it_stands(source: str, divides: bool) -> None:
    """In an argument, a variable or a group of the optimizer."""
    assert judge(f"{source}\nlook()") == (False, divides)


@pytest.mark.usefixtures("forgets_the_source")
def test_source_that_is_not_there_says_nothing() -> None:
    """A line of which no source is known."""
    frame = sys._getframe()
    assert not divides_learning_rate(frame)
    said: list[bool] = []
    exec("for _ in range(3):\n    look()", {"look": lambda: said.append(is_accumulating(sys._getframe(1)))})
    assert said == [False] * 3


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
    """Its sum or its mean; not where it is weighted or shown."""
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
    """Where it stands, and in what is made of it in a caller; a percentage is a mean."""
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
    """Not of what comes after it, nor of functions that are called so."""
    said: list[bool] = []
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    known: dict[str, Any] = {"tasks": "a", "p": SimpleNamespace(), "autograd": SimpleNamespace(grad=str)}
    exec(compile(source, NAME, "exec"), known | {"look": lambda: said.append(reads_gradients(sys._getframe(1)))})
    assert said == [reads]
