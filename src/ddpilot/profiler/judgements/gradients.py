# SPDX-License-Identifier: Apache-2.0
"""Judge the exchange of gradients: how much of it is exposed, and which option or size makes it long."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy

from ddpilot.profiler.judgements.judged import SMALL_SHARE, Judged, judged, lines_of, ms
from ddpilot.profiler.phases import Phases
from ddpilot.profiler.spans_file import SYNC_BATCH_NORM, RankTimes
from ddpilot.user_files import CodeLine

_COMMUNICATION_SHARE = 0.30
"""Exposed communication above this share of an update is too much; 10:1 of computation to communication is good."""
_LATENCY_S, _BYTES_PER_S = 1e-3, 0.5e9
"""The longest latency and the lowest bandwidth of a link, per bucket, that is not reported as slow."""
_SLOW_FACTOR, _QUICK = 3.0, 0.1
"""A link is slow if even the quickest tenth of the exchanges takes longer by this factor: a busy machine is not."""
_LATENCY_SHARE = 0.15
"""A batch is too small if an exchange at normal speed is exposed for this share of an update, and takes, with the
optimizer's step, longer than forward and backward."""
_GOOD_FIXED_SHARE = 0.25
_BUCKET_BYTES = 25 * 2**20
"""DDP's default."""
_NUM_SMALL_BUCKETS, _SMALL_BUCKET_BYTES = 8, 2**20
_COPY_BYTES_PER_S = 5e9
_SMALL_COPY_SHARE = 0.02


def judge_gradients(phases: Phases, times: Sequence[RankTimes]) -> Iterator[Judged]:
    """Judge what DDP does for gradients on several ranks."""
    if len(phases.ranks) < 2:
        return
    ddp: Mapping[str, Any] = times[0].facts.get("ddp", {})
    exposed_s = _exposed_s(phases)
    searched = list(_judge_search(phases, times, ddp))
    yield from searched
    yield from _judge_norms(phases, ddp)
    accumulated = list(_judge_accumulation(phases, exposed_s))
    buckets = list(_judge_buckets(phases, exposed_s, ddp, times[0].sites.get(ddp.get("site", -1))))
    yield from accumulated
    yield from buckets
    if not accumulated and not buckets:
        yield from _judge_exposed(phases, exposed_s, ddp)
    yield from _judge_copies(phases, ddp)


def _exposed_s(phases: Phases) -> float:
    """Return the seconds of an update that wait for DDP, without those of collectives of the program."""
    called = [sum(s for (phase, _), s in lines.items() if phase == "communication") for lines in phases.by_line]
    return max(0.0, phases.median("communication") - float(numpy.mean(called)))


def _judge_exposed(phases: Phases, exposed_s: float, ddp: Mapping[str, Any]) -> Iterator[Judged]:
    compute_s = sum(phases.median(name) for name in ("forward", "backward"))
    fixed_s = exposed_s + phases.median("optimizer")
    num_samples = float(numpy.median(phases.num_samples))
    expected_s = ddp.get("num_buckets", 0) * _LATENCY_S + ddp.get("parameter_bytes", 0) / _BYTES_PER_S
    least_s = float(numpy.quantile(phases.share("communication").mean(axis=0), _QUICK))
    is_slow = bool(ddp) and min(exposed_s, least_s) > _SLOW_FACTOR * expected_s
    if ddp and not is_slow and fixed_s >= compute_s and exposed_s >= _LATENCY_SHARE * phases.update_s:
        yield _judge_batch(phases, compute_s, fixed_s, num_samples)
        return
    if exposed_s < _COMMUNICATION_SHARE * phases.update_s:
        return
    size = f"{ddp['parameter_bytes'] / 1e6:.3g} MB of gradients over {ddp['backend']}" if ddp else ""
    hook = ", through a communication hook of the program" if ddp.get("has_comm_hook") else ""
    compute_s += phases.median("optimizer")
    evidence = [f"computation takes {ms(compute_s)}: {compute_s / exposed_s:.1f} to 1; 10 to 1 is good"]
    if phases.overlapped_s is not None:
        overlapped = ms(float(phases.overlapped_s.mean())) if phases.overlapped_s.any() else "none"
        evidence.append(f"{overlapped} of the exchange overlaps with the backward pass")
    if is_slow:
        speed = ddp["parameter_bytes"] / exposed_s / 1e6
        evidence.insert(0, f"{size}{hook}: {speed:.3g} MB/s; a link of this machine needs less than {ms(expected_s)}")
    elif size:
        evidence.insert(0, f"{size}{hook}")
    yield judged(
        "DDP723",
        f"an update waits {ms(exposed_s)} of {ms(phases.update_s)} for gradients to be exchanged"
        + (", over a slow link" if is_slow else ""),
        saved_s=exposed_s - expected_s if is_slow else exposed_s,
        total_s=phases.update_s,
        evidence=tuple(evidence),
        fix="Compare with the link's own speed, which `ddpilot doctor` measures" if is_slow else "",
    )


def _judge_batch(phases: Phases, compute_s: float, fixed_s: float, num_samples: float) -> Judged:
    """Judge a batch whose computation is short against what every update takes, whatever its batch."""
    needed = fixed_s * (1 / _GOOD_FIXED_SHARE - 1) / max(compute_s, 1e-6)
    size = f", {num_samples:g} samples," if num_samples else ""
    to = f"from about {_round_up(needed * num_samples)} samples on each rank" if num_samples else ""
    to = to or f"with about {needed:.2g} times as many samples"
    per_sample = needed * phases.update_s / (fixed_s + needed * compute_s)
    return judged(
        "DDP747",
        f"the batch of a rank{size} is too small: {ms(fixed_s)} of {ms(phases.update_s)} in an update do not grow "
        "with it",
        saved_s=phases.update_s * (1 - 1 / max(per_sample, 1.0)),
        total_s=phases.update_s,
        evidence=(
            f"forward and backward take {ms(compute_s)}; exchange of gradients and optimizer {ms(fixed_s)}",
            f"{to} that is {_GOOD_FIXED_SHARE:.0%} of an update (samples per second, not updates, grow)",
        ),
    )


def _round_up(number: float) -> int:
    """Return the next power of two."""
    return int(2 ** math.ceil(math.log2(max(number, 1))))


def _judge_buckets(phases: Phases, exposed_s: float, ddp: Mapping[str, Any], line: CodeLine | None) -> Iterator[Judged]:
    num, size = ddp.get("num_buckets", 0), ddp.get("parameter_bytes", 0)
    wanted = max(1, math.ceil(size / _BUCKET_BYTES))
    if num < max(_NUM_SMALL_BUCKETS, 4 * wanted) or size / num > _SMALL_BUCKET_BYTES:
        return
    saved_s = exposed_s * (1 - wanted / num)
    if saved_s < SMALL_SHARE * phases.update_s:
        return
    yield judged(
        "DDP743",
        f"an update waits {ms(exposed_s)} of {ms(phases.update_s)} for {num} buckets of {size / num / 1e3:.3g} kB",
        saved_s=saved_s,
        total_s=phases.update_s,
        line=line,
        evidence=(
            f"`bucket_cap_mb={ddp['bucket_cap_mb']:.3g}`; with 25, the default, there are {wanted} to {wanted + 1}",
        ),
    )


def _judge_search(phases: Phases, times: Sequence[RankTimes], ddp: Mapping[str, Any]) -> Iterator[Judged]:
    """Judge a search for unused parameters that never finds one."""
    if not ddp.get("find_unused_parameters") or any(each.facts.get("num_unused_parameters", 1) for each in times):
        return
    search_s = float(numpy.median(phases.counts["search_ns"].mean(axis=0))) / 1e9 if phases.counts.size else 0.0
    is_small = search_s < SMALL_SHARE * phases.update_s
    yield judged(
        "DDP742",
        f"DDP looks for unused parameters in every update, for {ms(search_s)} of {ms(phases.update_s)}, and finds none",
        saved_s=search_s,
        total_s=phases.update_s,
        line=times[0].sites.get(ddp.get("site", -1)),
        evidence=(f"every rank used all {ddp['num_parameters']} parameters in all {_num_seen(phases)} updates",),
        severity="info" if is_small else None,
    )


def _num_seen(phases: Phases) -> int:
    return phases.first_update - 1 + int(phases.seconds.shape[1])


def _judge_norms(phases: Phases, ddp: Mapping[str, Any]) -> Iterator[Judged]:
    for line, seconds in lines_of(phases, "communication"):
        mean_s = float(numpy.mean(seconds))
        if line == SYNC_BATCH_NORM and mean_s >= SMALL_SHARE * phases.mean_s:
            yield judged(
                "DDP745",
                f"SyncBatchNorm exchanges statistics for {ms(mean_s)} of {ms(phases.mean_s)} in an update",
                saved_s=mean_s,
                total_s=phases.mean_s,
                evidence=(
                    f"{ddp.get('num_sync_batch_norms', 0)} layers, each with collectives in forward and backward",
                ),
            )


def _judge_accumulation(phases: Phases, exposed_s: float) -> Iterator[Judged]:
    """Judge gradients that are exchanged several times before a step."""
    num = int(numpy.median(phases.counts["num_reductions"])) if phases.counts.size else 0
    saved_s = exposed_s * (num - 1) / max(num, 1)
    if num < 2:
        return
    lines = [line for line, _ in lines_of(phases, "backward")]
    yield judged(
        "DDP746",
        f"gradients are exchanged {num} times before each step of the optimizer",
        saved_s=saved_s,
        total_s=phases.update_s,
        line=lines[0] if lines else None,
        evidence=(f"the exchange takes {ms(exposed_s)} of {ms(phases.update_s)}; one at the end is enough",),
        severity="info" if saved_s < SMALL_SHARE * phases.update_s else None,
    )


def _judge_copies(phases: Phases, ddp: Mapping[str, Any]) -> Iterator[Judged]:
    size = ddp.get("parameter_bytes", 0)
    copies_s = 2 * size / _COPY_BYTES_PER_S
    if ddp.get("gradient_as_bucket_view", True) or copies_s < _SMALL_COPY_SHARE * phases.update_s:
        return
    yield judged(
        "DDP744",
        f"gradients are copied into buckets and back: {2 * size / 1e6:.3g} MB in an update",
        saved_s=copies_s,
        total_s=phases.update_s,
        evidence=(f"they take {size / 1e6:.3g} MB of memory twice", "estimated with 5 GB/s; not measured"),
    )
