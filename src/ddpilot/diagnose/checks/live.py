# SPDX-License-Identifier: Apache-2.0
"""Check what the ranks did together: they joined, got right values, and exchanged data as fast as their link."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from ddpilot.diagnose.facts import Answers, Facts, RankReport, in_units
from ddpilot.diagnose.reachability import LOOPBACK
from ddpilot.findings.catalog import find_known, make_finding
from ddpilot.findings.text import render_ranks

_LOOPBACK_BYTES_PER_S = 100e6
"""Minimum bandwidth of gloo over loopback on one busy core."""
_SHARE_OF_LINK = 0.3
"""A lower share of the link's speed is slow: TCP, checksums and the ring leave more on a healthy one."""
_SHARE_OF_MEDIAN = 0.4
_MODEL_BYTES = 400_000_000
"""Gradients of 100 million parameters in float32."""


def joined(facts: Facts) -> Answers:
    """All ranks joined one group."""
    if facts.live_failure is not None:
        yield facts.live_failure
        return
    failed = [report for report in facts.ranks if report.failure is not None]
    absent = sorted(
        set(range(facts.ranks[0].world_size)) - {report.rank for report in facts.ranks} if facts.ranks else ()
    )
    if failed:
        yield from _explain_failures(failed)
    elif absent:
        yield make_finding("DDP105", summary=f"{render_ranks(absent)} did not report", ranks=absent)
    elif facts.ranks and not facts.ranks[0].backend:
        summary = "the ranks have not formed a group, since their nodes cannot connect to each other"
        yield make_finding("DDP105", summary=summary, fix="Look at the errors about the network first", severity="info")
    elif facts.ranks:
        first = facts.ranks[0]
        slowest_s = max(report.joined_s for report in facts.ranks)
        devices = ", ".join(dict.fromkeys(report.device for report in facts.ranks))
        yield f"{first.world_size} ranks joined in {slowest_s:.1f} s on {devices} over {first.backend}"


def _explain_failures(failed: list[RankReport]) -> Answers:
    """One finding for the same error on several ranks; the error that names missing ranks comes alone."""
    naming = [report for report in failed if report.failure and report.failure["missing"]]
    seen: dict[str, list[int]] = {}
    for report in naming[:1] or failed:
        assert report.failure is not None
        seen.setdefault(f"{report.failure['did']}: {report.failure['found']}", []).append(report.rank)
    for summary, ranks in seen.items():
        failure = next(report.failure for report in failed if report.rank == ranks[0])
        assert failure is not None
        known = find_known(summary)
        code = "DDP105" if failure["missing"] or not known else known[0].code
        about = failure["missing"] or ranks
        fix = failure["fix"].rstrip(".")
        yield make_finding(code, summary=summary, ranks=about, fix=fix, severity="error")


def values(facts: Facts) -> Answers:
    """all_reduce, broadcast and gather_object of rank numbers give the right values."""
    reports = [report for report in facts.ranks if report.failure is None and report.backend]
    wrong = [report for report in reports if report.wrong]
    if wrong:
        evidence = [f"rank {report.rank}: {text}" for report in wrong for text in report.wrong]
        ranks = [report.rank for report in wrong]
        yield make_finding("DDP808", summary=f"wrong values on {render_ranks(ranks)}", ranks=ranks, evidence=evidence)
    elif reports:
        yield f"all_reduce, broadcast and gather_object are right on {render_ranks([each.rank for each in reports])}"


def all_reduce_speed(facts: Facts) -> Answers:
    """Times of all_reduce by size, against what the link should give."""
    reports = [report for report in facts.ranks if report.group_times]
    if not reports or reports[0].world_size == 1:
        return
    size, link = reports[0].world_size, reports[0].link
    by_size = {
        num_bytes: statistics.median(dict(report.group_times)[num_bytes] for report in reports)
        for num_bytes, _ in reports[0].group_times
    }
    largest = max(by_size)
    rate = 2 * (size - 1) / size * largest / by_size[largest]
    times = ", ".join(f"{in_units(num_bytes)} {_in_ms(seconds)}" for num_bytes, seconds in by_size.items())
    update_s = 2 * (size - 1) / size * _MODEL_BYTES / rate
    text = f"{times}: {in_units(rate)}/s over {link}; gradients of 100 M parameters take {update_s:.1f} s"
    yield from _judge(text, rate, reports[0], "DDP807")


def pair_speed(facts: Facts) -> Answers:
    """Latency and bandwidth of each pair of ranks, against the link and against the other pairs."""
    pairs = [(report, peer, dict(times)) for report in facts.ranks for peer, times in report.pair_times]
    pairs = [pair for pair in pairs if pair[0].rank < pair[1]]
    if not pairs:
        return
    texts = [f"{report.rank}-{peer} {_by_size(times)}" for report, peer, times in pairs]
    rates = [max(times) / times[max(times)] for *_, times in pairs]
    median = statistics.median(rates)
    slow = [pair for pair, rate in zip(pairs, rates, strict=True) if rate < _SHARE_OF_MEDIAN * median]
    if slow:
        names = ", ".join(f"{report.rank}-{peer}" for report, peer, _ in slow)
        hosts = {f"rank {report.rank} on {report.host}" for report in facts.ranks}
        summary = f"ranks {names} exchange data at under {_SHARE_OF_MEDIAN:.0%} of the median of {in_units(median)}/s"
        yield make_finding("DDP807", summary=summary, evidence=[*texts, ", ".join(sorted(hosts))])
    else:
        yield from _judge(f"one way: {'; '.join(texts)}", min(rates), pairs[rates.index(min(rates))][0], "DDP807")


def _by_size(times: Mapping[int, float]) -> str:
    """``8 B 0.08 ms, 4.0 MB 2.00 ms (2.0 GB/s)``: the largest size also as a rate."""
    largest = max(times)
    text = ", ".join(f"{in_units(num_bytes)} {_in_ms(seconds)}" for num_bytes, seconds in sorted(times.items()))
    return f"{text} ({in_units(largest / times[largest])}/s)"


def _judge(text: str, rate: float, report: RankReport, code: str) -> Answers:
    """Yield `text` as ok, or a finding if `rate` is far below what the link of `report` should give."""
    known = report.link_bytes_per_s
    if known is not None:
        least, link = _SHARE_OF_LINK * known, f"{report.link} gives {in_units(known)}/s"
    elif report.link == LOOPBACK:
        least, link = _LOOPBACK_BYTES_PER_S, f"gloo over loopback gives {in_units(_LOOPBACK_BYTES_PER_S)}/s or more"
    else:
        yield f"{text}; the speed of {report.link} is not known, so this is not judged"
        return
    if rate < least:
        yield make_finding(code, summary=f"{in_units(rate)}/s, where {link}", evidence=[text])
    else:
        yield f"{text}; {link}"


def threads(facts: Facts) -> Answers:
    """Threads of all ranks on a node against its cores."""
    for node in sorted({report.node_rank for report in facts.ranks}):
        reports = [report for report in facts.ranks if report.node_rank == node]
        total = sum(report.num_threads for report in reports)
        num_cores = reports[0].versions.get("num_cores") or total
        text = f"{len(reports)} ranks of torch use {total} threads on {num_cores} cores"
        if total > num_cores and total > len(reports):
            fix = f"`export OMP_NUM_THREADS={max(1, num_cores // len(reports))}`"
            yield make_finding("DDP804", summary=f"node {node}: {text}", fix=fix)
        elif node == 0:
            yield text


def _in_ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
