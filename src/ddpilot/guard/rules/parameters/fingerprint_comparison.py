# SPDX-License-Identifier: Apache-2.0
"""Compare the fingerprints that several ranks took at the same step."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpilot.guard.notes import MAX_GRADIENTS, NOT_SEEN, Fingerprint

TOLERANCES = {"p": 1e-5, "w": 1e-3, "g": 1e-4}
"""Relative tolerances: norms of parameters (p), weighted sums (w, which may nearly cancel), norms of gradients (g).
Equal numbers have equal fingerprints on identical machines; the tolerances allow for different machines.
"""


@dataclass(frozen=True)
class Difference:
    """The differences between ranks at one step: by the tensor's name, a line with the values."""

    gradients: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    """The ranks that differ from the majority; all ranks if there is no majority."""


def compare(names: Mapping[int, Sequence[str]], fingerprints: Mapping[int, Fingerprint], *, of: str = "") -> Difference:
    """Compare `fingerprints`, by rank, for the tensors that all ranks have; `names`: by rank, in order.

    `of`: the part of the tensors that the numbers describe, if not all of it.
    """
    ranks = sorted(fingerprints)
    first = fingerprints[ranks[0]]
    if all(fingerprints[rank] == first and names[rank] == names[ranks[0]] for rank in ranks):
        return Difference()
    numbers = {rank: {key: unpack(fingerprints[rank][key]) for key in "pwg"} for rank in ranks}
    places = {rank: {name: place for place, name in enumerate(names[rank])} for rank in ranks}
    common = [name for name in names[ranks[0]] if all(name in places[rank] for rank in ranks)]
    found: dict[str, dict[str, str]] = {"g": {}, "p": {}}
    looks: dict[int, list[tuple[float, ...]]] = {rank: [] for rank in ranks}
    for name in common:
        for kinds in ("g", "pw"):
            values = {kind: [numbers[rank][kind][places[rank][name]] for rank in ranks] for kind in kinds}
            wrong = [kind for kind in kinds if not are_alike(values[kind], TOLERANCES[kind])]
            if wrong:
                what = "weighted sum" if wrong[0] == "w" else "norm"
                found[kinds[0]][name] = f"{what} {of}{_format(ranks, values[wrong[0]])}"
                for at, rank in enumerate(ranks):
                    looks[rank].append(tuple(_rounded(values[kind][at]) for kind in kinds))
    return Difference(found["g"], found["p"], _outliers(looks))


def seen_gradients(fingerprint: Fingerprint) -> list[float | None]:
    """Return the norm of each parameter's gradient: 0 if it has none, None if it was not examined."""
    norms = unpack(fingerprint["g"])
    return [(0.0 if len(norms) <= MAX_GRADIENTS else None) if norm == NOT_SEEN else norm for norm in norms]


def are_alike(values: Sequence[float], tolerance: float) -> bool:
    """Return True if `values` differ by at most `tolerance` relative to the largest, or if none of them is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) != len(values):
        return not finite  # NaN on all ranks is reported by a different rule
    return max(values) - min(values) <= tolerance * max(map(abs, values))


def _format(ranks: Sequence[int], values: Sequence[float]) -> str:
    shown = [
        f"rank {rank} {'none' if value == NOT_SEEN else f'{value:.6g}'}"
        for rank, value in zip(ranks, values, strict=True)
    ]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:7], f"... {shown[-1]}"])


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _outliers(looks: Mapping[int, Sequence[object]]) -> tuple[int, ...]:
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank, look in looks.items():
        alike.setdefault(tuple(look), []).append(rank)
    largest = max(map(len, alike.values()))
    most = [ranks for ranks in alike.values() if len(ranks) == largest]
    return tuple(sorted(rank for rank in looks if len(most) > 1 or rank not in most[0]))


def unpack(text: str) -> array[float]:
    """Decode one row of a fingerprint into float32 numbers."""
    return array("f", base64.b64decode(text))
