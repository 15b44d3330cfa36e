# SPDX-License-Identifier: Apache-2.0
"""Make what a rank records: updates of phases one after another, of given lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from ddpilot.profiler.judgements.judged import Judged
from ddpilot.profiler.phases import divide_updates
from ddpilot.profiler.result import judge
from ddpilot.profiler.spans_file import COUNTS, PHASES, SPAN, UPDATE, RankTimes
from ddpilot.user_files import CodeLine

MS = 1_000_000
LINE = CodeLine("train.py", 7, "train", "the line")
NUM_UPDATES = 24
DDP: dict[str, Any] = {
    "parameter_bytes": 4_000_000,
    "num_parameters": 10,
    "num_buckets": 1,
    "bucket_cap_mb": 25,
    "find_unused_parameters": False,
    "gradient_as_bucket_view": True,
    "backend": "gloo",
    "site": 0,
}


def make_times(
    rank: int,
    lengths_ms: Mapping[str, float | Sequence[float]],
    *,
    end_ms: float | None = None,
    facts: Mapping[str, Any] | None = None,
    sites: Mapping[str, int] | None = None,
    **counts: int | Sequence[int],
) -> RankTimes:
    """A rank whose updates have these phases in order, and end after `end_ms`, the sum of them by default.

    Lengths and counts: for all updates, or for each in turn. `sites`: numbers of the lines of phases, -1 by default.
    """
    spans, updates, begin = [], [], 0
    for update in range(NUM_UPDATES):
        at = begin
        for name, lengths in lengths_ms.items():
            end = at + round(_at(lengths, update) * MS)
            spans.append((at, end, PHASES.index(name), (sites or {}).get(name, -1)))
            at = end
        begin = at if end_ms is None else begin + round(end_ms * MS)
        updates.append((begin, 8))
    noted = numpy.zeros(NUM_UPDATES, COUNTS)
    for name, values in counts.items():
        noted[name] = [_at(values, update) for update in range(NUM_UPDATES)]
    return RankTimes(
        rank=rank,
        spans=numpy.array(spans, SPAN),
        updates=numpy.array(updates, UPDATE),
        sites={0: LINE},
        facts={"local_world_size": 2, **(facts or {})},
        counts=noted,
    )


def _at(values: Any, update: int) -> Any:
    return values[update % len(values)] if isinstance(values, Sequence) else values


def judge_times(*times: RankTimes) -> list[Judged]:
    """What is judged of these ranks."""
    phases = divide_updates(times)
    assert phases is not None
    return list(judge(phases, times))


def judge_codes(*times: RankTimes) -> list[str]:
    """The codes of it, the most expensive first."""
    return [each.finding.code for each in judge_times(*times)]
