# SPDX-License-Identifier: Apache-2.0
"""Compare a program at several numbers of ranks, attribute what is lost, and predict other numbers. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.profiler.phases import SHARES
from ddpilot.profiler.result import Profile
from ddpilot.profiler.scaling.model import (
    Prediction,
    ScalingModel,
    SizeSample,
    fit_model,
    make_sample,
)
from ddpilot.profiler.scaling.result import LEAST_SHOWN, HeldOut, Scaling, ScalingRow, expected_efficiency

Kind = Literal["weak", "strong"]
_LEAST = 0.80
"""Efficiency below which a finding warns."""
_NO_GAIN = 1.05
"""More ranks that are not faster by more than this give nothing: it is within what runs differ by."""
_WORTH = 1.10
"""Minimum speed-up for a batch to be reported as gaining from more ranks."""
_STRAGGLERS, _EXCHANGE, _LINK = "stragglers and barriers", "exposed communication", "inter-node link"
_SHARED, _SMALLER = "cores and memory shared on this machine", "smaller batch per rank"
_LOSSES = {
    "data": "loader",
    "copy": "copy to the device",
    "waiting": _STRAGGLERS,
    "shadow": _STRAGGLERS,
    "communication": _EXCHANGE,
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "sync": "waiting for the device",
    "other": "other code",
}
"""Causes by share; of computation it depends on the kind of scaling."""
CAUSES = frozenset({*_LOSSES.values(), _LINK, _SHARED, _SMALLER})
"""All that speed can be lost to."""


def compare_sizes(
    title: str, by_size: Mapping[int, Sequence[Profile]], predicted: Sequence[int] | None = None
) -> Scaling:
    """Compare the rounds of each number of ranks. All need samples to count: a DataLoader.

    Time is compared by sample of a rank, so that it does not matter whether batches are those of a rank or of all.
    `predicted`: numbers of ranks to predict; None: twice the largest.
    """
    samples = [make_sample(size, rounds) for size, rounds in sorted(by_size.items())]
    first = samples[0]
    is_weak = all(abs(each.batch / first.batch - 1) <= 0.2 for each in samples)
    kind: Kind = "weak" if is_weak else "strong"
    near = [each for each in samples if each.nnodes == 1]
    on_a_node = fit_model(near) if near else None
    rows = [_make_row(each, by_size, kind, on_a_node) for each in samples]
    model = fit_model(samples)
    wanted = (2 * samples[-1].num_ranks,) if predicted is None else predicted
    more = [_predict_row(model, size, samples, rows[0], kind) for size in sorted({*wanted} - {*by_size})]
    found = [*_judge(rows), *_judge_gain(rows, model, kind)]
    return Scaling(
        title=title,
        kind=kind,
        rows=tuple(rows),
        predicted=tuple(more),
        held_out=_hold_out(samples),
        notes=tuple(_describe(model, samples)) if more else (),
        findings=Findings(found, more="`ddpilot scale --json`"),
    )


def _make_row(
    sample: SizeSample, by_size: Mapping[int, Sequence[Profile]], kind: Kind, on_a_node: ScalingModel | None
) -> ScalingRow:
    """Return the row of a measured number of ranks. `on_a_node`: fitted to ranks of one node, if there are such."""
    size, first = sample.num_ranks, min(by_size)
    speeds = [each.phases.samples_per_s for each in by_size[size]]
    speed_up = statistics.median(speeds) / statistics.median(each.phases.samples_per_s for each in by_size[first])
    factor = sample.batch / statistics.fmean(float(each.phases.num_samples.mean()) for each in by_size[first])
    is_shared = kind == "weak" or not sample.is_fair
    lost = _find_losses(by_size[size], by_size[first], factor, is_shared=is_shared)
    if sample.nnodes > 1 and _EXCHANGE in lost:
        near_s = 0.0 if on_a_node is None else on_a_node.predict(size, sample.batch).exposed_s
        lost[_LINK] = min(lost[_EXCHANGE], max(0.0, (sample.exposed_s - near_s) / sample.update_s))
        lost[_EXCHANGE] -= lost[_LINK]
    return ScalingRow(
        num_ranks=size,
        samples_per_s=statistics.median(speeds),
        spread=(min(speeds), max(speeds)),
        speed_up=speed_up,
        efficiency=speed_up / (size / first),
        lost=lost,
        is_fair=sample.is_fair,
        update_s=sample.update_s,
        batch=sample.batch,
    )


def _find_losses(
    rounds: Sequence[Profile], base: Sequence[Profile], factor: float, *, is_shared: bool
) -> dict[str, float]:
    """Return the share of an update, by cause, beyond `factor` times the seconds of `base`."""
    seconds, before = _mean_shares(rounds), _mean_shares(base)
    total_s = sum(seconds.values())
    found: dict[str, float] = {}
    for name in SHARES:
        cause = _LOSSES.get(name, _SHARED if is_shared else _SMALLER)
        found[cause] = found.get(cause, 0.0) + (seconds[name] - before[name] * factor) / total_s
    return {cause: share for cause, share in found.items() if share > 0}


def _mean_shares(rounds: Sequence[Profile]) -> dict[str, float]:
    """Return mean seconds of an update by share, over rounds, updates and ranks."""
    return {name: statistics.fmean(float(each.phases.share(name).mean()) for each in rounds) for name in SHARES}


def _batch_at(num_ranks: int, sample: SizeSample, kind: Kind) -> float:
    """Return the samples of a rank at `num_ranks`, given those of a measured number."""
    return sample.batch if kind == "weak" else sample.batch * sample.num_ranks / num_ranks


def _predict_row(
    model: ScalingModel, num_ranks: int, samples: Sequence[SizeSample], first: ScalingRow, kind: Kind
) -> ScalingRow:
    found = model.predict(num_ranks, _batch_at(num_ranks, samples[-1], kind))
    base = model.predict(first.num_ranks, _batch_at(first.num_ranks, samples[-1], kind))
    speed_up = found.samples_per_s / base.samples_per_s
    return ScalingRow(
        num_ranks=num_ranks,
        samples_per_s=found.samples_per_s,
        spread=(found.samples_per_s, found.samples_per_s),
        speed_up=speed_up,
        efficiency=speed_up / (num_ranks / first.num_ranks),
        lost=_predict_losses(found, base),
        is_fair=True,
        update_s=found.update_s,
        batch=found.batch,
        is_predicted=True,
    )


def _predict_losses(found: Prediction, base: Prediction) -> dict[str, float]:
    factor = found.batch / base.batch if base.batch else 1.0
    pairs = {
        _SMALLER: (found.own_s, base.own_s),
        _STRAGGLERS: (found.waiting_s, base.waiting_s),
        _EXCHANGE: (found.exposed_s + found.called_s, base.exposed_s + base.called_s),
    }
    lost = {name: (seconds - before * factor) / found.update_s for name, (seconds, before) in pairs.items()}
    return {name: share for name, share in lost.items() if share > 0}


def _hold_out(samples: Sequence[SizeSample]) -> HeldOut | None:
    """Fit the model without the largest number of ranks, and compare its prediction for that one."""
    if len(samples) < 2:
        return None
    *fitted, largest = samples
    model = fit_model(fitted, link_of=largest)
    return HeldOut(
        fitted=model.fitted,
        num_ranks=largest.num_ranks,
        predicted_s=model.predict(largest.num_ranks, largest.batch).update_s,
        measured_s=largest.update_s,
        is_fair=largest.is_fair,
        is_farther=largest.nnodes > 1 and model.base.nnodes == 1,
    )


def _describe(model: ScalingModel, samples: Sequence[SizeSample]) -> Iterator[str]:
    """Yield what the predictions assume."""
    sizes = ", ".join(map(str, model.fitted))
    text = f"model: fitted at {sizes} rank{'s' * (model.fitted != (1,))}, {model.base.own_s * 1e3:.3g} ms of own work"
    if model.link is not None and model.buckets:
        ring = (
            f"{model.link.latency_s * 1e6:.0f} us and {model.link.bytes_per_s / 1e6:,.0f} MB/s for each step of a ring"
        )
        num = len(model.buckets)
        buckets = f"{num} bucket{'s' * (num > 1)} of {sum(model.buckets) / 1e6:.3g} MB together"
        where = "nodes" if samples[-1].nnodes > 1 else "ranks of this machine"
        text += f", {buckets} over {ring}, as measured between {where}"
        text += f", of which {model.base.window_s * 1e3:.3g} ms overlap with the backward pass"
    yield text
    if not all(each.is_fair for each in samples):
        yield "predicted for a machine with a core or GPU for each rank, which this one is not"


def _judge(rows: Sequence[ScalingRow]) -> Iterator[Finding]:
    last = rows[-1]
    if len(rows) < 2 or last.efficiency >= _LEAST:
        return
    causes = sorted(last.lost.items(), key=lambda item: -item[1])
    evidence = [f"{share:.0%} of an update: {name}" for name, share in causes if share >= LEAST_SHOWN]
    expected = expected_efficiency(last.num_ranks)
    if expected is not None:
        evidence.append(f"{expected[0]:.0%} to {expected[1]:.0%} are usual for {last.num_ranks} GPUs with a good link")
    if not last.is_fair:
        evidence.append("the ranks share cores or a device here: on a machine with one for each it may be different")
    yield make_finding(
        "DDP726",
        summary=f"{last.num_ranks} ranks are {last.speed_up:.2f} times as fast as {rows[0].num_ranks}: "
        f"an efficiency of {last.efficiency:.0%}",
        evidence=evidence,
        severity="warning" if last.is_fair else "info",
    )


def _judge_gain(rows: Sequence[ScalingRow], model: ScalingModel, kind: Kind) -> Iterator[Finding]:
    """Judge more ranks that are not faster: why, and from which batch on they would be."""
    first, last = rows[0], rows[-1]
    if len(rows) < 2 or not last.is_fair or max(row.speed_up for row in rows[1:]) > _NO_GAIN:
        return
    num = last.num_ranks
    found = model.predict(num, last.batch)
    beyond_s = max(0.0, last.update_s - found.own_s)
    evidence = [f"of {last.update_s * 1e3:.3g} ms of an update a rank computes {found.own_s * 1e3:.3g} ms"]
    evidence.append(f"waiting for other ranks and exchanging gradients take {beyond_s * 1e3:.3g} ms")
    ratio = num / first.num_ranks
    is_strong = kind == "strong"
    gains = model.smallest_batch(num, first.num_ranks, _WORTH / ratio, is_strong=is_strong)
    good = model.smallest_batch(num, first.num_ranks, _LEAST, is_strong=is_strong)
    fix = ""
    if gains is not None and good is not None and gains > last.batch:
        fix = (
            f"Use one rank, or a larger batch: by the model {num} ranks are faster from {gains} samples of a rank on, "
            f"and {_LEAST:.0%} efficient from {good} on (now {last.batch:.3g}), or with as many times the work a sample"
        )
    yield make_finding(
        "DDP727",
        summary=f"no gain expected from more ranks: {num} are {last.speed_up:.2f} times as fast as {first.num_ranks}",
        evidence=evidence,
        fix=fix,
    )
