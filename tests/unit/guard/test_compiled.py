# SPDX-License-Identifier: Apache-2.0
"""Compiled functions of guard give the same results as their Python counterparts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpilot.guard.probes.parameters.ddp_model import look_at_gradients
from ddpilot.record.collectives import native
from ddpilot.record.journal import NUM_STEPS, JournalWriter, read_journal


@pytest.fixture(scope="module")
def compiled() -> Any:
    """The compiled part of recording."""
    if not ((built := native.built_path()) is not None and built.exists()):
        pytest.skip("the compiled part of recording is not built: `ddpilot build-recorder`")
    return native.find("native", print)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_is_surely_finite_says_so_of_what_is_finite_only(compiled: Any, dtype: torch.dtype) -> None:
    """For the largest and the smallest numbers, and not if any element is not finite."""
    info = torch.finfo(dtype)
    numbers = torch.tensor([info.max, info.min, info.tiny, info.smallest_normal / 4, 0.0, -0.0], dtype=dtype)
    for tensor in (numbers, numbers[2:4], numbers[0], torch.nn.Parameter(numbers.clone())):
        assert compiled.is_surely_finite(tensor) is True
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        for place in range(len(numbers)):
            tensor = numbers.clone()
            tensor[place] = value
            assert compiled.is_surely_finite(tensor) is False
            assert compiled.is_surely_finite(tensor[place]) is False


class Marked(Tensor):
    """A subclass, which may store its values anywhere."""


def test_is_surely_finite_leaves_to_an_operator_what_it_does_not_know(compiled: Any) -> None:
    """Different dtypes, layouts and devices, empty and large tensors, subclasses, and objects that are not tensors."""
    plain = torch.zeros(3, 3)
    unknown: list[Any] = [
        plain[:, :2],
        plain[:0],
        plain.long(),
        plain.to_sparse(),
        plain.to("meta"),
        torch.zeros(100_000),
    ]
    unknown += [plain.as_subclass(Marked), torch._efficientzerotensor(3), None, 1.0]
    assert [compiled.is_surely_finite(one) for one in unknown] == [False] * len(unknown)


def train(*parameters: Tensor) -> None:
    """One backward that reaches only these."""
    torch.autograd.backward(torch.cat(parameters).sum())


def look_at_each(look: Callable[..., Any]) -> list[bool]:
    """True for each operation that changes gradients, False for the others."""
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    fleeting = [torch.nn.Parameter(torch.ones(2))]
    state, has_changed_since = look([first, second, *fleeting])
    actions: list[Callable[[], Any]] = [
        lambda: None,
        lambda: train(second),
        lambda: train(second),
        lambda: first.sum(),
        lambda: setattr(second, "grad", None),
        lambda: train(first, fleeting[0]),
        lambda: fleeting[0].grad.zero_(),  # type: ignore[union-attr]
        lambda: first.grad.data.add_(1),  # type: ignore[union-attr]
        lambda: setattr(first, "grad", torch.zeros(2)),
        fleeting.clear,
    ]
    found = []
    for action in actions:
        before = state()
        action()
        found.append(has_changed_since(before))
    return found


def test_compiled_gradients_change_when_those_of_python_do(compiled: Any) -> None:
    """By a backward, by removing, writing or replacing gradients, and with a parameter that was freed."""
    found = look_at_each(compiled.look_at_gradients)
    assert found == look_at_each(look_at_gradients)
    assert found == [False, True, True, False, True, True, True, False, True, True]


def write_steps(writer: JournalWriter, path: Path) -> list[Any]:
    """More ordinary steps than are kept, among other entries, read at the end."""
    writer.write("first", {})
    for number in range(NUM_STEPS):
        writer.write_step(1, number, 1 << 40, "FBFBFBFB")
    writer.write_step(2, 9, -1, "")
    writer.write("step", {"u": 2})
    writer.write_step(2, 10, 5, "FBFBFBFBF")
    writer.close()
    writer.write_step(2, 11, 6, "FB")
    journal = read_journal(path)
    times = [entry.time_ns for entry in journal.entries]
    assert sorted(times) == times
    return [journal.num_lost, *((entry.index, entry.kind, entry.values) for entry in journal.entries)]


def test_compiled_steps_read_as_those_of_python(compiled: Any, tmp_path: Path) -> None:
    """With their numbers in order among other entries, until the journal is closed."""
    python, other = (JournalWriter(tmp_path / name, rank=0) for name in ("python", "compiled"))
    other.use_compiled(compiled)
    assert write_steps(python, tmp_path / "python") == write_steps(other, tmp_path / "compiled")


def test_compiled_steps_are_not_written_by_a_fork(compiled: Any, tmp_path: Path) -> None:
    """A forked copy's steps are not in the journal."""
    writer = JournalWriter(tmp_path / "journal", rank=0)
    writer.use_compiled(compiled)
    writer.write_step(1, 1, 1, "FB")
    child = os.fork()
    if not child:
        writer.write_step(1, 2, 2, "FB")
        os._exit(0)
    os.waitpid(child, 0)
    assert [entry.values["step"] for entry in read_journal(tmp_path / "journal").entries] == [1]
