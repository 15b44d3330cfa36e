# SPDX-License-Identifier: Apache-2.0
"""Compare the fingerprints that several ranks took at the same moment of training."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TOLERANCES = {"p": 1e-5, "w": 1e-3, "g": 1e-4}
"""Relative: of norms of parameters, of weighted sums (which may nearly cancel), of norms of gradients. On machines
alike the same numbers have the same fingerprint; these leave room for different ones."""

ALL_SEEN = 64
"""Of so many parameters and fewer every gradient is looked at."""

NOT_SEEN = -1.0
"""The norm of a gradient that is not there, or was not looked at."""


@dataclass(frozen=True)
class Difference:
    """What differs between ranks at one moment; lines say it with values, by the tensor's name."""

    gradients: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    """Those unlike most; all where no two agree more than others."""


def compare(
    names: Mapping[int, Sequence[str]], fingerprints: Mapping[int, Mapping[str, str]], *, of: str = ""
) -> Difference:
    """How `fingerprints`, by rank, differ in the tensors that all these ranks have, `names` being theirs in order.

    `of`: what the numbers are of, where that is not all of a tensor.
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
                found[kinds[0]][name] = f"{what} {of}{_say(ranks, values[wrong[0]])}"
                for at, rank in enumerate(ranks):
                    looks[rank].append(tuple(_rounded(values[kind][at]) for kind in kinds))
    return Difference(found["g"], found["p"], _odd_ones(looks))


def seen_gradients(fingerprint: Mapping[str, str]) -> list[float | None]:
    """The norm of each parameter's gradient, 0 where it has none; None where it was not looked at."""
    norms = unpack(fingerprint["g"])
    return [(0.0 if len(norms) <= ALL_SEEN else None) if norm == NOT_SEEN else norm for norm in norms]


def are_alike(values: Sequence[float], tolerance: float) -> bool:
    """True if `values` differ by no more than `tolerance`, relative to the largest, or if none of them is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) != len(values):
        return not finite  # NaN everywhere is another matter
    return max(values) - min(values) <= tolerance * max(map(abs, values))


def _say(ranks: Sequence[int], values: Sequence[float]) -> str:
    said = [
        f"rank {rank} {'none' if value == NOT_SEEN else f'{value:.6g}'}"
        for rank, value in zip(ranks, values, strict=True)
    ]
    return ", ".join(said if len(said) <= 8 else [*said[:7], f"... {said[-1]}"])


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _odd_ones(looks: Mapping[int, Sequence[object]]) -> tuple[int, ...]:
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank, look in looks.items():
        alike.setdefault(tuple(look), []).append(rank)
    largest = max(map(len, alike.values()))
    most = [ranks for ranks in alike.values() if len(ranks) == largest]
    return tuple(sorted(rank for rank in looks if len(most) > 1 or rank not in most[0]))


def unpack(text: str) -> array[float]:
    """The float32 numbers of one row of a fingerprint."""
    return array("f", base64.b64decode(text))
