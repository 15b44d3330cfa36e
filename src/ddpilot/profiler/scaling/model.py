# SPDX-License-Identifier: Apache-2.0
"""`ScalingModel`: predict the duration of an update at other numbers of ranks and batch sizes. Does not import torch.

An update is a rank's own work, the wait for the slowest rank, collectives that the program calls itself, and what DDP's
buckets take beyond the backward pass. Own work and the spread among ranks are measured; the time of a bucket follows
from the latency and bandwidth of the group, measured by all_reduces in it, as a ring has them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ddpilot.profiler.phases import COMMUNICATION, SHARES
from ddpilot.profiler.result import Profile

OWN_SHARES = tuple(name for name in SHARES if name not in ("waiting", "communication", "shadow"))
_FACTORS = (0.25, 4.0)
"""Limits of how much longer a bucket may take in the program than in the micro-benchmark."""
_MAX_BATCH = 1 << 22


@dataclass(frozen=True)
class Link:
    """Latency of a step of a ring, in seconds, and bytes per second of one link of it."""

    latency_s: float
    bytes_per_s: float

    def all_reduce_s(self, num_ranks: int, num_bytes: float) -> float:
        """Return the seconds of an all_reduce in a ring of `num_ranks`."""
        num_steps = 2 * (num_ranks - 1)
        return num_steps * (self.latency_s + num_bytes / num_ranks / self.bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class SizeSample:
    """Measurements at one number of ranks; seconds of an update are means over updates and ranks."""

    num_ranks: int
    batch: float
    """Samples of an update on each rank."""
    update_s: float
    own_s: float
    """A rank's own work."""
    waiting_s: float
    exposed_s: float
    """Time of the exchange after the last gradient."""
    called_s: float
    """Collectives that the program calls itself."""
    window_s: float
    """From the first bucket that is ready until the last gradient: the time in which buckets cost nothing."""
    draws_s: numpy.ndarray[Any, Any]
    """A rank's own work in each update, of all ranks."""
    buckets: tuple[int, ...]
    """Bytes of DDP's buckets, in the order in which they are ready; empty without DDP."""
    link: Link | None
    """None on one rank, or if the group was not measured."""
    is_fair: bool
    nnodes: int = 1
    """Nodes that the ranks were on."""


def make_sample(num_ranks: int, rounds: Sequence[Profile]) -> SizeSample:
    """Return what the rounds at `num_ranks` have measured."""
    means = {name: statistics.median(float(each.phases.share(name).mean()) for each in rounds) for name in SHARES}
    own_s = sum(means[name] for name in OWN_SHARES)
    called_s = statistics.median(_called(each) for each in rounds)
    facts = [each.facts[0] if each.facts else {} for each in rounds]
    places = [SHARES.index(name) for name in OWN_SHARES]
    return SizeSample(
        num_ranks=num_ranks,
        batch=statistics.fmean(float(each.phases.num_samples.mean()) for each in rounds),
        update_s=statistics.median(float(each.phases.durations_s.mean()) for each in rounds),
        own_s=own_s,
        waiting_s=means["waiting"] + means["shadow"],
        exposed_s=max(0.0, means["communication"] - called_s),
        called_s=min(called_s, means["communication"]),
        window_s=means["backward"] * statistics.median(_overlapped_share(each) for each in facts),
        draws_s=numpy.concatenate([each.phases.seconds[:, :, places].sum(axis=2).ravel() for each in rounds]),
        buckets=tuple(facts[0].get("buckets", ())),
        link=_fit_link(num_ranks, [fact for each in rounds for fact in each.facts]),
        is_fair=all(each.is_fair for each in rounds),
        nnodes=max(each.get("world_size", 1) // max(1, each.get("local_world_size", 1)) for each in facts),
    )


def _called(profile: Profile) -> float:
    return sum(seconds for (phase, _), seconds in profile.phases.by_site.items() if phase == COMMUNICATION)


def _overlapped_share(facts: Mapping[str, Any]) -> float:
    """Return the part of a backward pass during which gradients can be exchanged, by DDP's own log."""
    times = facts.get("ddp_times", {})
    backward_ns = times.get("backward_ns", 0)
    return min(1.0, times.get("overlap_ns", 0) / backward_ns) if backward_ns else 0.0


def _fit_link(num_ranks: int, facts: Sequence[Mapping[str, Any]]) -> Link | None:
    """Return latency and bandwidth from the smallest and the largest all_reduce that ranks have measured."""
    times = [dict(map(tuple, each["all_reduce_s"])) for each in facts if each.get("all_reduce_s")]
    if num_ranks < 2 or not times:
        return None
    medians = {size: statistics.median(each[size] for each in times) for size in times[0]}
    smallest, largest = min(medians), max(medians)
    num_steps = 2 * (num_ranks - 1)
    beyond_s = max(medians[largest] - medians[smallest], 1e-9)
    return Link(medians[smallest] / num_steps, num_steps / num_ranks * (largest - smallest) / beyond_s)


@dataclass(frozen=True)
class Prediction:
    """The duration of an update, in seconds, and its parts."""

    num_ranks: int
    batch: float
    own_s: float
    waiting_s: float
    exposed_s: float
    called_s: float

    @property
    def update_s(self) -> float:
        """Seconds of an update."""
        return self.own_s + self.waiting_s + self.exposed_s + self.called_s

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks in a second."""
        return self.num_ranks * self.batch / self.update_s


@dataclass(frozen=True, kw_only=True)
class ScalingModel:
    """Fitted to some numbers of ranks by `fit_model`."""

    fitted: tuple[int, ...]
    """Numbers of ranks to which the model was fitted."""
    base: SizeSample
    """The largest of them, whose spread among ranks is taken for all."""
    constant_s: float
    """Own work that does not depend on the batch, in seconds."""
    sample_s: float
    """Own work of a sample, in seconds."""
    buckets: tuple[int, ...]
    link: Link | None
    overhead_s: float
    """Time that DDP needs after the last gradient on one rank, without any exchange."""
    bucket_factor: float
    """How much longer buckets take in the program than the micro-benchmark has it."""
    waiting_factor: float
    """How much longer ranks wait for the slowest than the spread of their work has it."""

    def predict(self, num_ranks: int, batch: float) -> Prediction:
        """Return the prediction for `num_ranks` with `batch` samples on each."""
        own_s = self.constant_s + self.sample_s * batch
        work = own_s / self.base.own_s if self.base.own_s else 1.0
        called_s = self.base.called_s
        if self.link is not None and self.base.num_ranks > 1:
            called_s *= (num_ranks - 1) / (self.base.num_ranks - 1)
        window_s = self.base.window_s * work
        return Prediction(
            num_ranks=num_ranks,
            batch=batch,
            own_s=own_s,
            waiting_s=self.waiting_factor * expected_wait(self.base.draws_s, num_ranks),
            exposed_s=self._exposed(num_ranks, window_s),
            called_s=called_s if num_ranks > 1 else 0.0,
        )

    def _exposed(self, num_ranks: int, window_s: float) -> float:
        if self.link is not None and self.buckets:
            return self.overhead_s + exposed(self.buckets, self.link, num_ranks, window_s, self.bucket_factor)
        if self.base.num_ranks == 1 or num_ranks == 1:
            return self.overhead_s
        return self.base.exposed_s * (1 - 1 / num_ranks) / (1 - 1 / self.base.num_ranks)  # the bytes of a ring

    def smallest_batch(self, num_ranks: int, first: int, efficiency: float, *, is_strong: bool = False) -> int | None:
        """Return the smallest batch of a rank with this efficiency at `num_ranks` compared with `first`; None if none.

        A sample is taken to cost the same in any batch, unless batches of several sizes were measured. `is_strong`: all
        ranks together have as many samples with any number of ranks.
        """
        ratio = num_ranks / first
        low, high = 0, _MAX_BATCH
        while high - low > 1:
            batch = (low + high) // 2
            base = self.predict(first, batch * ratio if is_strong else batch)
            is_enough = self.predict(num_ranks, batch).samples_per_s >= efficiency * ratio * base.samples_per_s
            low, high = (low, batch) if is_enough else (batch, high)
        return high if high < _MAX_BATCH else None


def fit_model(samples: Sequence[SizeSample], link_of: SizeSample | None = None) -> ScalingModel:
    """Fit the model to what was measured at some numbers of ranks.

    Numbers at which ranks share cores or a device are left out if there are others. `link_of`: where the group was
    measured if no sample has several ranks.
    """
    fair = [each for each in samples if each.is_fair] or [samples[0]]
    base = fair[-1]
    measured = next((each for each in reversed([*samples, *([link_of] if link_of else [])]) if each.link), None)
    link = measured.link if measured else None
    others = (*reversed(fair), *samples, *([link_of] if link_of else []))
    buckets = next((each.buckets for each in others if each.buckets), ())
    constant_s, sample_s = _fit_work(fair)
    spread = [(each.waiting_s, expected_wait(each.draws_s, each.num_ranks)) for each in fair if each.num_ranks > 1]
    expected_s = sum(expected for _, expected in spread)
    waiting_factor = sum(waited for waited, _ in spread) / expected_s if expected_s else 1.0
    overhead_s = next((each.exposed_s for each in fair if each.num_ranks == 1), 0.0)
    several = [each for each in fair if each.num_ranks > 1 and each.link and each.buckets]
    return ScalingModel(
        fitted=tuple(each.num_ranks for each in fair),
        base=base,
        constant_s=constant_s,
        sample_s=sample_s,
        buckets=buckets,
        link=link,
        overhead_s=overhead_s,
        bucket_factor=_fit_factor(several[-1], link, overhead_s) if several and link else 1.0,
        waiting_factor=waiting_factor,
    )


def _fit_work(samples: Sequence[SizeSample]) -> tuple[float, float]:
    """Return own work without and for each sample, in seconds, by least squares if there are several batch sizes."""
    batches = numpy.array([each.batch for each in samples])
    own_s = numpy.array([each.own_s for each in samples])
    if not batches.all():
        return float(own_s.mean()), 0.0
    if numpy.ptp(batches) > 0.2 * batches.mean():
        slope, constant = numpy.polyfit(batches, own_s, 1)
        if slope >= 0 and constant >= 0:
            return float(constant), float(slope)
    return 0.0, float((own_s / batches).mean())


def expected_wait(draws_s: numpy.ndarray[Any, Any], num_ranks: int) -> float:
    """Return how much longer than the mean the slowest of `num_ranks` draws takes, on average, in seconds."""
    ordered = numpy.sort(draws_s)
    shares = (numpy.arange(len(ordered) + 1) / len(ordered)) ** num_ranks
    return float((ordered * numpy.diff(shares)).sum() - ordered.mean())


def exposed(buckets: Sequence[int], link: Link | None, num_ranks: int, window_s: float, factor: float = 1.0) -> float:
    """Return the seconds that `buckets` take after the last gradient, exchanged one after another.

    The first is ready `window_s` before the last gradient, the last one with it, the others in between.
    """
    if link is None or num_ranks < 2 or not buckets:
        return 0.0
    free_s = 0.0
    for place, num_bytes in enumerate(buckets):
        ready_s = window_s * place / max(1, len(buckets) - 1) if len(buckets) > 1 else window_s
        free_s = max(free_s, ready_s) + factor * link.all_reduce_s(num_ranks, num_bytes)
    return free_s - window_s


def _fit_factor(sample: SizeSample, link: Link, overhead_s: float) -> float:
    """Return the factor of the buckets' time with which the model exposes what was measured, within `_FACTORS`."""
    low, high = _FACTORS
    for _ in range(40):
        middle = (low + high) / 2
        expected_s = overhead_s + exposed(sample.buckets, link, sample.num_ranks, sample.window_s, middle)
        is_less = expected_s < sample.exposed_s
        low, high = (middle, high) if is_less else (low, middle)
    return high
