# SPDX-License-Identifier: Apache-2.0
"""Collect all judgements of a profile, weigh them against a busy machine, and sort them by gain. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddpilot.findings.catalog import make_finding
from ddpilot.profiler.judgements.gradients import judge_gradients
from ddpilot.profiler.judgements.host import judge_host, judge_threads
from ddpilot.profiler.judgements.judged import Judged, core_wait_s, ms
from ddpilot.profiler.judgements.ranks import judge_ranks
from ddpilot.profiler.phases import Phases, divide_updates
from ddpilot.profiler.spans_file import HOST_CLOCK, RankTimes

_ALL_BUSY = 0.20
"""If threads wait this share of the time for a core, other shares are long for that reason, too."""
_BUSY = 0.10
"""If ranks wait this share of the time for a core, other processes use the machine."""
_AFFECTED = ("DDP722", "DDP723", "DDP743", "DDP747")


def judge(phases: Phases, times: Sequence[RankTimes]) -> tuple[Judged, ...]:
    """Return the causes of slow updates, the largest gain first. `times`: those of the host."""
    of_host = phases if phases.clock == HOST_CLOCK else divide_updates(times) or phases
    found = [*judge_ranks(phases), *judge_gradients(phases, times), *judge_host(phases, of_host, times)]
    threads = judge_threads(times)
    if threads is not None and threads.factor > 1 / (1 - _ALL_BUSY):
        found = [each for each in found if each.finding.code not in _AFFECTED]
    else:
        found = _weigh(found, phases)
    if threads is not None:
        found.append(threads)
    return tuple(sorted(found, key=lambda each: -each.factor))


def _weigh(found: Sequence[Judged], phases: Phases) -> list[Judged]:
    """Return `found`; where ranks wait for a core, with that, and without warnings about what takes less time."""
    wait_s = core_wait_s(phases)
    share = wait_s / phases.mean_s
    if share < _BUSY:
        return list(found)
    more = f"less than the {ms(wait_s)} that a rank waits for a core"
    weighed = [_soften(each, more) if 1 - 1 / each.factor < share else each for each in found]
    summary = (
        f"the ranks share their cores with other processes: one waits {ms(wait_s)} of {ms(phases.mean_s)} for a core"
    )
    return [*weighed, Judged(make_finding("DDP751", summary=summary), 1.0)]


def _soften(each: Judged, more: str) -> Judged:
    finding = replace(each.finding, severity="info", evidence=(*each.finding.evidence, more))
    return Judged(finding, each.factor)
