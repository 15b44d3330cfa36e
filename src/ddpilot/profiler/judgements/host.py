# SPDX-License-Identifier: Apache-2.0
"""Judge what the program does on the host: data, reads of values, collectives and checkpoints of a line, threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from ddpilot.findings.catalog import make_finding
from ddpilot.profiler.judgements.judged import SMALL_SHARE, Judged, judged, lines_of, longest_line, ms
from ddpilot.profiler.phases import Phases
from ddpilot.profiler.spans_file import SYNC_BATCH_NORM, RankTimes

_DATA_SHARE = 0.10
_EVALUATION_SHARE = 0.10
_CORE_WAIT_SHARE = 0.10
_SYNC_SHARE = 0.02
_LEAST_GROUPS = 4
_QUIET = 0.2
"""Loaders deliver in time if they are waited for by less than this part of the mean wait."""


def judge_host(phases: Phases, of_host: Phases, times: Sequence[RankTimes]) -> Iterator[Judged]:
    """Judge what happens on the host. `of_host`: the phases by its clock, by which it waits for a device."""
    yield from _judge_data(phases, times)
    yield from _judge_pageable(phases, times)
    yield from _judge_reads(of_host, times)
    yield from _judge_collectives(phases)
    yield from _judge_checkpoints(phases)
    yield from _judge_evaluation(phases)
    yield from _judge_data_parallel(times)


def judge_threads(times: Sequence[RankTimes]) -> Judged | None:
    """Judge ranks that have more threads than there are cores, by how long threads waited for a core."""
    facts = times[0].facts
    local = times[: facts.get("local_world_size", 1)]
    num_threads = sum(each.facts.get("num_threads", 0) for each in local)
    num_cores = facts.get("num_cores", 0)
    if facts.get("uses_device") or not num_cores or num_threads <= num_cores or len(times) < 2:
        return None
    summary = f"{num_threads} threads of {facts.get('local_world_size')} ranks share {num_cores} cores"
    shares = [each.facts["core_wait_share"] for each in local if "core_wait_share" in each.facts]
    if not shares:
        return Judged(make_finding("DDP804", summary=summary), 1.0)
    share = min(float(max(shares)), 0.9)
    return judged(
        "DDP804",
        f"{summary}: a thread waits {share:.0%} of the time for a core",
        saved_s=share,
        total_s=1.0,
        severity="info" if share < _CORE_WAIT_SHARE else None,
    )


def _judge_data(phases: Phases, times: Sequence[RankTimes]) -> Iterator[Judged]:
    seconds = phases.share("data").mean(axis=1)
    least_s = float(seconds.min())
    if least_s < _DATA_SHARE * phases.mean_s:
        return
    num_workers = times[0].facts.get("num_workers")
    workers = "" if num_workers is None else f"; the loader has {num_workers} workers on each rank"
    fix = "Set `num_workers=`, so that batches are loaded while the model computes" if not num_workers else ""
    queue = (num_workers or 0) * (times[0].facts.get("loader", {}).get("prefetch_factor") or 0)
    in_bursts = queue > 0 and _waits_in_bursts(phases.share("data"), queue)
    if in_bursts:
        workers += f", whose queue of {queue} batches is empty now and then only"
    yield judged(
        "DDP753" if in_bursts else "DDP721",
        f"every rank waits {ms(least_s)} of {ms(phases.mean_s)} in an update for its DataLoader{workers}",
        saved_s=least_s,
        total_s=phases.mean_s,
        line=longest_line(phases, "data", 0),
        evidence=tuple(f"rank {rank}: {ms(each)}" for rank, each in zip(phases.ranks, seconds, strict=True)),
        fix=fix,
    )


def _waits_in_bursts(seconds: numpy.ndarray[Any, Any], queue: int) -> bool:
    """True if most of the time the workers deliver in time: in a few of the groups of `queue` updates a rank waits.

    Workers that are too slow deliver in bunches as well, but every group has its wait. `seconds`: [ranks, updates]
    """
    num_groups = seconds.shape[1] // queue
    if num_groups < _LEAST_GROUPS:
        return False
    groups = numpy.array([part.mean(axis=1) for part in numpy.array_split(seconds, num_groups, axis=1)])
    return bool((numpy.median(groups, axis=0) < _QUIET * groups.mean(axis=0)).all())


def _judge_pageable(phases: Phases, times: Sequence[RankTimes]) -> Iterator[Judged]:
    """Judge copies to a device from memory that is not pinned, for which the host waits."""
    loader = times[0].facts.get("loader")
    copies_s = float(phases.share("copy").mean())
    if not times[0].facts.get("uses_device") or not loader or loader.get("pin_memory"):
        return
    if copies_s >= SMALL_SHARE * phases.mean_s:
        yield judged(
            "DDP752",
            f"batches are copied to the device for {ms(copies_s)} of {ms(phases.mean_s)} in an update, from memory "
            "that is not pinned",
            saved_s=copies_s,
            total_s=phases.mean_s,
            line=longest_line(phases, "copy", 0),
            evidence=("the loader has `pin_memory=False`: each copy passes through a buffer of the driver",),
        )


def _judge_reads(phases: Phases, times: Sequence[RankTimes]) -> Iterator[Judged]:
    """Judge lines that read values: they wait for a device, or take long because there are many."""
    waiting = [(line, float(numpy.mean(seconds))) for line, seconds in lines_of(phases, "sync")]
    waited_s = sum(seconds for _, seconds in waiting)
    if times[0].facts.get("uses_device"):
        # While the host waits the device computes; what is lost is the time in which it has nothing queued.
        saved_s = min(waited_s, phases.mean_s - waited_s)
        if waiting and saved_s >= _SYNC_SHARE * phases.mean_s:
            yield judged(
                "DDP741",
                f"the host waits {ms(waited_s)} of {ms(phases.mean_s)} in an update for values from the device",
                saved_s=saved_s,
                total_s=phases.mean_s,
                line=waiting[0][0],
                evidence=(
                    *(f"{ms(seconds)}: {line}" for line, seconds in waiting[:3]),
                    f"meanwhile it queues nothing: the device then waits for the host's {ms(saved_s)}, at most",
                ),
                severity="info" if saved_s < SMALL_SHARE * phases.mean_s else None,
            )
        return
    reads = {line: (0, seconds) for line, seconds in waiting}
    for site, calls, ns in times[0].facts.get("short_reads", ()):
        line = times[0].sites.get(site)
        if line is not None:
            reads[line] = calls, reads.get(line, (0, 0.0))[1] + ns / 1e9 / max(len(times[0].updates), 1)
    for line, (calls, seconds) in sorted(reads.items(), key=lambda item: -item[1][1])[:1]:
        if seconds >= SMALL_SHARE * phases.mean_s:
            many = f", {calls / len(times[0].updates):.3g} times," if calls > len(times[0].updates) else ""
            yield judged(
                "DDP741",
                f"a line reads values of tensors{many} for {ms(seconds)} of {ms(phases.mean_s)} in an update",
                saved_s=seconds,
                total_s=phases.mean_s,
                line=line,
            )


def _judge_collectives(phases: Phases) -> Iterator[Judged]:
    """Judge collectives of the program itself; the time in them until the last rank came is not theirs."""
    for line, seconds in lines_of(phases, "communication"):
        mean_s = float(numpy.mean(seconds))
        if line != SYNC_BATCH_NORM and mean_s >= SMALL_SHARE * phases.mean_s:
            yield judged(
                "DDP724",
                f"a line takes {ms(mean_s)} of {ms(phases.mean_s)} in an update",
                saved_s=mean_s,
                total_s=phases.mean_s,
                line=line,
            )


def _judge_checkpoints(phases: Phases) -> Iterator[Judged]:
    """Judge lines that save: the other ranks wait for those that do."""
    for line, seconds in lines_of(phases, "checkpoint"):
        longest_s = max(seconds)
        if longest_s >= SMALL_SHARE * phases.mean_s:
            some = tuple(rank for rank, each in zip(phases.ranks, seconds, strict=True) if each > longest_s / 2)
            yield judged(
                "DDP725",
                f"a line takes {ms(longest_s)} of {ms(phases.mean_s)} in an update",
                saved_s=longest_s,
                total_s=phases.mean_s,
                ranks=some if len(some) < len(phases.ranks) else (),
                line=line,
            )


def _judge_evaluation(phases: Phases) -> Iterator[Judged]:
    mean_s = float(phases.share("evaluation").mean())
    if mean_s >= _EVALUATION_SHARE * phases.mean_s:
        yield judged(
            "DDP749",
            f"evaluation takes {ms(mean_s)} of {ms(phases.mean_s)} in an update, on average over all",
            saved_s=mean_s,
            total_s=phases.mean_s,
            line=longest_line(phases, "evaluation", 0),
        )


def _judge_data_parallel(times: Sequence[RankTimes]) -> Iterator[Judged]:
    num_devices, site = times[0].facts.get("data_parallel", (0, -1))
    if num_devices > 1:
        summary = f"a rank uses DataParallel on {num_devices} devices, which copies the model in each forward pass"
        yield Judged(make_finding("DDP750", summary=summary, line=times[0].sites.get(site)), 1.0)
