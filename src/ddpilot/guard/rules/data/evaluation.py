# SPDX-License-Identifier: Apache-2.0
"""DDP405 and DDP406: an evaluation that counts samples twice, and a mean of means over unequal numbers of samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.notes import CollectedNote, LoaderPassNote
from ddpilot.guard.rules.rule import (
    NS_PER_S,
    BoundedDict,
    Pass,
    RuleContext,
    WaitingRule,
    finding_at_line,
    line_of,
    pass_of,
)
from ddpilot.record.flight_ring.log import RankLog, Tensor
from ddpilot.record.journal import Entry

_MAX_PASSES = 4096
_OF_TORCH = ("SequentialSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "DistributedSampler")
_MAX_SAMPLES = 5000
"""With more samples, float32 cannot show which quotients have this denominator."""


@dataclass
class _Evaluation:
    note: LoaderPassNote
    begun_ns: int
    order: int | None = None
    num_read: int = 0


class PaddedEvaluation(WaitingRule[_Evaluation]):
    """Reports samplers that pad the ranks' parts with repeated samples, if iterated without gradients.

    For DistributedSampler, the padding is known. A sampler of the program's own is recognized if all ranks read equally
    many samples of different parts, together slightly more than the dataset has.

    A loader that has trained a model is not reported, nor one after which the ranks gather something as long as a
    batch: they may have removed the repeated samples.
    """

    kinds = ("loader_pass", "trains", "order", "pass_end")
    patience_ns = NS_PER_S
    waits_for_more = True

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._passes: BoundedDict[tuple[int, Pass], _Evaluation] = BoundedDict(_MAX_PASSES)
        self._training: BoundedDict[tuple[int, int], None] = BoundedDict(_MAX_PASSES)

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        values = entry.values
        key = (rank, pass_of(values))
        if entry.kind == "loader_pass":
            if _num_repeated(values) or _is_own_part(values):
                self._passes[key] = _Evaluation(values, entry.time_ns)
        elif entry.kind == "trains":
            self._training[rank, values["loader"]] = None
        elif entry.kind == "order":
            if key in self._passes:
                self._passes[key].order = values["order"]
        elif (rank, values["loader"]) in self._training:
            self._passes.pop(key, None)  # training data may be iterated again for statistics of BatchNorm
        elif values["evaluates"] and (found := self._passes.pop(key, None)):
            found.num_read = values["samples"]
            self._wait(line_of(found.note["site"]), rank, found, entry.time_ns)
        return ()

    def _gather_samples(self, by_rank: Mapping[int, _Evaluation]) -> bool:
        """True if ranks have, or may have, gathered something as long as a batch since the pass began."""
        logs = ((self._context.log(rank), found) for rank, found in by_rank.items())
        seen = list(islice(((log, found) for log, found in logs if log is not None), 2))
        if not seen:
            return not self._context.has_all_logs
        return any(_gathers_samples(log, found) for log, found in seen)

    def _finding(self, by_rank: dict[int, _Evaluation]) -> Finding | None:
        first = next(iter(by_rank.values()))
        samples, sampler = first.note["samples"], first.note["sampler"] or {}
        if repeated := _num_repeated(first.note):
            did = f"makes {sampler['replicas']} equal parts of {samples} samples: the first {repeated} come again"
        else:
            repeated = _num_read_again(by_rank, self._context.world_size)
            did = (
                f"gave each rank a different part of {first.num_read} samples, {repeated} more in total than there are"
            )
        if not repeated or self._gather_samples(by_rank):
            return None
        notes = {rank: found.note for rank, found in by_rank.items()}
        summary = f"{repeated} of {samples} samples are evaluated twice"
        return finding_at_line("DDP405", notes, summary, f"{sampler['kind']} {did}")


def _gathers_samples(log: RankLog, found: _Evaluation) -> bool:
    later = [one for one in log.collectives if one.ddp is None and one.start_ns >= found.begun_ns]
    batch = found.note["size"] or 1
    return any("gather" in one.op and _num_elements(one.inputs) >= batch for one in later)


def _num_repeated(note: LoaderPassNote) -> int:
    sampler, samples = note["sampler"] or {}, note["samples"]
    replicas = sampler.get("replicas")
    if not samples or not replicas or sampler.get("drop_last") is not False:
        return 0
    if sampler.get("even_batches"):  # Accelerate's: each rank gets the same number of full batches
        part = 0 if sampler.get("split_batches") else int(replicas) * (note["size"] or 0)
        return -samples % part if part else 0
    padding = -samples % int(replicas)
    return padding if sampler.get("length") == math.ceil(samples / replicas) else 0


def _is_own_part(note: LoaderPassNote) -> bool:
    """True if a sampler of the program's own takes a part of the dataset, and it is unknown which."""
    sampler, samples = note["sampler"] or {}, note["samples"]
    is_own = sampler.get("kind") not in _OF_TORCH and "even_batches" not in sampler
    return bool(samples and is_own and sampler.get("length") and sampler["length"] < samples)


def _num_read_again(by_rank: Mapping[int, _Evaluation], world_size: int) -> int:
    """Return the number of samples that the ranks read beyond the size of the dataset; 0 if that is not padding."""
    first = next(iter(by_rank.values()))
    samples = first.note["samples"] or 0
    if len(by_rank) < world_size or len({(one.note["samples"], one.num_read) for one in by_rank.values()}) > 1:
        return 0
    orders = {one.order for one in by_rank.values()}
    if None in orders or len(orders) < world_size:
        return 0  # ranks that read the same samples have no separate parts
    more = world_size * first.num_read - samples
    return more if 0 < more < world_size * (first.note["size"] or 1) else 0


def _num_elements(tensors: Iterable[Tensor]) -> int:
    return max((math.prod(tensor.shape) for tensor in tensors), default=0)


class MeanOfMeans(WaitingRule[list[CollectedNote]]):
    """Reports numbers that the ranks combine after an evaluation with unequal numbers of samples.

    These are averages of one number, and sums or gathers of one quotient whose denominator is the rank's own count.
    Gathered objects may be displayed one by one; they are reported only if the program takes their mean.
    """

    kinds = ("collected",)
    waits_for_more = True  # until all ranks have had time to collect the counts

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._collected: BoundedDict[tuple[int, Pass], list[CollectedNote]] = BoundedDict(_MAX_PASSES)

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        key = pass_of(entry.values)
        mine = self._collected.setdefault((rank, key), [])
        if len(mine) < 16:
            mine.append(entry.values)
        self._wait(key, rank, mine, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, list[CollectedNote]]) -> Finding | None:
        return _find_mean_of_means(by_rank) if len(by_rank) == self._context.world_size else None


def _find_mean_of_means(by_rank: Mapping[int, list[CollectedNote]]) -> Finding | None:
    samples = {rank: values[0]["samples"] for rank, values in by_rank.items()}
    if len(set(samples.values())) == 1 or max(samples.values()) > _MAX_SAMPLES or min(samples.values()) < 1:
        return None
    if any(_is_count(one, samples[rank]) for rank, values in by_rank.items() for one in values):
        return None
    for number in range(min(len(values) for values in by_rank.values())):
        found = {rank: notes[number] for rank, notes in by_rank.items()}
        first = next(iter(found.values()))
        if any((one["op"], one["reduce"], one["numel"]) != (first["op"], first["reduce"], 1) for one in found.values()):
            continue
        if not all(one["averages"] for one in found.values()):
            continue
        # No value is None: `_is_count` has excluded that.
        values = {rank: one["value"] or 0.0 for rank, one in found.items()}
        if _is_average(found, values) or _are_quotients(values, samples):
            return _make_finding(found, values, samples)
        if _are_batch_means(found, values, samples):
            return _make_finding(found, values, samples, of_batches=True)
    return None


def _is_count(one: CollectedNote, samples: int) -> bool:
    return one["numel"] != 1 or one["value"] is None or math.isclose(one["value"], samples)


def _is_average(found: Mapping[int, CollectedNote], values: Mapping[int, float]) -> bool:
    return all(one["reduce"] == "avg" for one in found.values()) and any(value % 1 for value in values.values())


def _are_quotients(values: Mapping[int, float], samples: Mapping[int, int]) -> bool:
    """True if the values are quotients by the ranks' own numbers of samples, and not by the total."""
    total = sum(samples.values())
    own = [value for rank, value in values.items() if _is_near_integer(value * samples[rank], 1e-3)]
    broken = [value for value in own if 0 < value < 1]
    of_all = [value for value in broken if _is_near_integer(value * total, 1e-2)]
    return len(own) == len(values) and len(broken) >= 2 and len(of_all) < len(broken)


def _are_batch_means(
    found: Mapping[int, CollectedNote], values: Mapping[int, float], samples: Mapping[int, int]
) -> bool:
    """True if each rank's value is the mean of its batches' means, with a smaller last batch."""
    total = sum(samples.values())
    num_sure = 0
    for rank, one in found.items():
        value, sizes, num = values[rank], one["sizes"] or [0, 0, 0], one["batches"]
        whole, last = sizes[0], sizes[-1]
        if len(sizes) > 2 or whole * (num - 1) + last != samples[rank] or not 0 < value < 1:
            return False
        parts = num * math.lcm(whole, last)
        if parts > _MAX_SAMPLES or not _is_near_integer(value * parts, 1e-3):
            return False
        # A simple fraction may be any value, such as a ratio that the program has set.
        is_simple = Fraction(round(value * parts), parts).denominator <= whole
        is_other = any(_is_near_integer(value * number, 1e-2) for number in (samples[rank], total))
        num_sure += whole != last and not is_simple and not is_other
    return num_sure > 0


def _is_near_integer(value: float, tolerance: float) -> bool:
    return math.isfinite(value) and abs(value - round(value)) < tolerance


def _make_finding(
    found: Mapping[int, CollectedNote],
    values: Mapping[int, float],
    samples: Mapping[int, int],
    *,
    of_batches: bool = False,
) -> Finding:
    true = sum(value * samples[rank] for rank, value in values.items()) / sum(samples.values())
    mean = sum(values.values()) / len(found)
    shown = list(found)[:8]
    return finding_at_line(
        "DDP406",
        found,
        f"the means of {render_ranks(found)} are averaged with equal weight, although the ranks evaluated different "
        "numbers of samples",
        *(f"rank {rank}: {values[rank]:.6g} of {samples[rank]} samples" for rank in shown),
        *(
            f"on rank {rank} it is the mean over {found[rank]['batches']} batches of {found[rank]['sizes'][0]}, "
            f"the last of {found[rank]['sizes'][-1]}"
            for rank in (shown if of_batches else ())
        ),
        f"the mean of these is {mean:.6g}" + ("" if of_batches else f", that of all samples {true:.6g}"),
        why="A rank with few samples counts as much as one with many"
        + (", and so does a batch with few." if of_batches else "."),
    )
