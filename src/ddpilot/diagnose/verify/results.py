# SPDX-License-Identifier: Apache-2.0
"""Compare what a program shows: the numbers that a function returns, or that rank 0 of a script prints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ddpilot.diagnose.verify.runs import EXACT, Runs
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(?:[eE][-+]?\d+)?")
_GROWTH = 100.0
"""How much larger than the effect of rounding on a parameter its effect on a metric may be."""
_LEAST = 1e-4
_MAX_NAMED = 5


def find_result_fault(runs: Runs) -> Finding | None:
    """Return a finding if a returned or printed number depends on the number of ranks, and the training does not."""
    if runs.single.values and runs.parallel.values:
        return _find_returned(runs)
    changed = list(_compare_lines(runs.single.output, runs.parallel.output, _LEAST))
    changed = changed and list(_compare_lines(runs.single.output, runs.parallel.output, _limit(runs)))
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
    changed = []
    for rank, value in enumerate(runs.parallel.values):
        for name, number in _numbers_in(value):
            if name not in expected or _is_close(expected[name], number, _LEAST):
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


def _compare_lines(one: tuple[str, ...], other: tuple[str, ...], limit: float) -> Iterator[tuple[str, str]]:
    """Yield pairs of lines that are alike but for numbers with a decimal point, of which one differs."""
    for left, right in zip(one, other, strict=False):
        if _NUMBER.sub("#", left) != _NUMBER.sub("#", right):
            continue
        for first, second in zip(_NUMBER.findall(left), _NUMBER.findall(right), strict=True):
            last_place = 10.0 ** -len(first.partition(".")[2].partition("e")[0])
            if not _is_close(float(first), float(second), limit) and abs(float(first) - float(second)) > 2 * last_place:
                yield left.strip(), right.strip()
                break
