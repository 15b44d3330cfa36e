# SPDX-License-Identifier: Apache-2.0
"""Compare what a program shows: the numbers that a function returns, or that rank 0 of a script prints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ddpilot.diagnose.verify.runs import EXACT, Runs
from ddpilot.diagnose.verify.target import Run
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(?:[eE][-+]?\d+)?")
_MEASURED = re.compile(
    r"(?i)(time|seconds?|elapsed|eta|speed|throughput|memory|per.sec|took|duration)\w*[^\w,;|]{0,6}$"
)
"""Names of numbers that depend on the machine, in front of a number, or at the end of its name."""
_UNIT = re.compile(r"\s?(s|ms|us|sec|secs|seconds?|min|it/s|/s|[kMG]i?B)\b")
_GROWTH = 100.0
"""How much larger than the effect of rounding on a parameter its effect on a metric may be."""
_LEAST = 1e-4
_MAX_NAMED = 5


def find_result_fault(runs: Runs) -> Finding | None:
    """Return a finding if a returned or printed number depends on the number of ranks, and the training does not."""
    if runs.single.values and runs.parallel.values:
        return _find_returned(runs)
    one, all_, again = (run.output for run in (runs.single, runs.parallel, runs.repeated))
    changed = list(compare_lines(one, all_, again, _LEAST, own_losses(runs.parallel, 0)))
    changed = changed and list(compare_lines(one, all_, again, _limit(runs), own_losses(runs.parallel, 0)))
    if not changed:
        return None
    return make_finding(
        "DDP825",
        summary=f"rank 0 prints other numbers on {runs.nproc_per_node} ranks than on one",
        evidence=[f"1 rank: {one}; rank 0 of {runs.nproc_per_node}: {other}" for one, other in changed[:_MAX_NAMED]],
    )


def _limit(runs: Runs) -> float:
    """Return the relative difference that rounding explains; measured by another run."""
    return max(_LEAST, _GROWTH * runs.noise)


def _find_returned(runs: Runs) -> Finding | None:
    expected = dict(_numbers_in(runs.single.values[0]))
    again = dict(_numbers_in(runs.repeated.values[0])) if runs.repeated.values else {}
    changed = []
    for rank, value in enumerate(runs.parallel.values):
        losses = own_losses(runs.parallel, rank)
        for name, number in _numbers_in(value):
            if name not in expected or _is_close(expected[name], number, _LEAST) or _MEASURED.search(name):
                continue
            is_own = any(_is_close(number, loss, _LEAST) for loss in losses)
            if is_own or not _is_close(expected[name], again.get(name, expected[name]), _LEAST):
                continue
            if not _is_close(expected[name], number, _limit(runs)):
                changed.append(
                    (rank, f"{name or 'the value'}: {expected[name]:.6g} on 1 rank, {number:.6g} on rank {rank}")
                )
    if not changed:
        return None
    return make_finding(
        "DDP825",
        summary=f"the function returns other numbers on {runs.nproc_per_node} ranks than on one",
        ranks=sorted({rank for rank, _ in changed}),
        evidence=[text for _, text in changed[:_MAX_NAMED]],
    )


def _numbers_in(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the floating point numbers in nested containers with a name such as ``history[0].loss``."""
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers_in(each, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _numbers_in(each, f"{name}[{number}]")


def _is_close(one: float, other: float, limit: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    return abs(one - other) <= max(limit * max(abs(one), abs(other)), EXACT)


def own_losses(run: Run, rank: int) -> list[float]:
    """Return the losses that `rank` has computed in training, and their means since the start."""
    losses = [loss for update in run.ranks[rank].updates for loss in update.losses]
    return [*losses, *(sum(losses[:num]) / num for num in range(2, len(losses) + 1))]


def compare_lines(
    one: tuple[str, ...], other: tuple[str, ...], again: tuple[str, ...], limit: float, losses: list[float]
) -> Iterator[tuple[str, str]]:
    """Yield pairs of lines that are alike but for numbers with a decimal point, of which one differs.

    `again`: the lines of `one` in a second run; what differs in them, such as a time, is not compared. Nor are numbers
    of `other` that are in `losses`, and those that are named as a time, a speed or a size of memory.
    """
    for number, (left, right) in enumerate(zip(one, other, strict=False)):
        if not _are_alike(left, right):
            continue
        same = again[number] if number < len(again) and _are_alike(left, again[number]) else left
        for first, second, third in zip(*map(_NUMBER.finditer, (left, right, same)), strict=True):
            is_measured = _MEASURED.search(left[max(0, first.start() - 30) : first.start()]) or _UNIT.match(
                left, first.end()
            )
            is_own = any(_are_printed_alike(second[0], loss, _LEAST) for loss in losses)
            if is_measured or is_own or not _are_printed_alike(first[0], float(third[0]), _LEAST):
                continue
            if not _are_printed_alike(first[0], float(second[0]), limit):
                yield left.strip(), right.strip()
                break


def _are_alike(left: str, right: str) -> bool:
    return _NUMBER.sub("#", left) == _NUMBER.sub("#", right)


def _are_printed_alike(text: str, other: float, limit: float) -> bool:
    """True if `other` is the number `text`, up to two units of its last place."""
    digits, _, exponent = text.lower().partition("e")
    last_place = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return _is_close(float(text), other, limit) or abs(float(text) - other) <= 2 * last_place
