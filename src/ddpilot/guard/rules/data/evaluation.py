# SPDX-License-Identifier: Apache-2.0
"""DDP405 and DDP406: an evaluation that counts samples twice, and a mean of means over unequal numbers of samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import islice
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.rules.rule import NS_PER_S, BoundedDict, RuleContext, WaitingRule, line_of, place_of
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.journal import Entry

_MAX_PASSES = 4096
_OF_TORCH = ("SequentialSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "DistributedSampler")
_MAX_SAMPLES = 5000
"""With more samples, float32 cannot show which quotients have this denominator."""


class PaddedEvaluation(WaitingRule):
    """Reports samplers that pad the ranks' parts with repeated samples, if iterated without gradients.

    For DistributedSampler, the padding is known. A sampler of the program's own is recognized if all ranks read equally
    many samples of different parts, together slightly more than the dataset has.

    A loader that has trained a model is not reported, nor one after which the ranks gather something as long as a
    batch: they may have removed the repeated samples.
    """

    codes: tuple[str, ...] = ("DDP405",)
    kinds: tuple[str, ...] = ("loader_pass", "trains", "order", "pass_end")
    patience_ns = NS_PER_S
    waits_for_more = True

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._passes: BoundedDict[tuple[int, int, int], dict[str, Any]] = BoundedDict(_MAX_PASSES)
        self._training: BoundedDict[tuple[int, int], None] = BoundedDict(_MAX_PASSES)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        values = entry.values
        key = (rank, values["loader"], values["pass"])
        if entry.kind == "loader_pass":
            if _num_repeated(values) or _is_own_part(values):
                self._passes[key] = {**values, "begun_ns": entry.time_ns}
        elif entry.kind == "trains":
            self._training[key[:2]] = None
        elif entry.kind == "order":
            if key in self._passes:
                self._passes[key]["order"] = values["order"]
        elif key[:2] in self._training:
            self._passes.pop(key, None)  # training data may be iterated again for statistics of BatchNorm
        elif values["evaluates"] and (facts := self._passes.pop(key, None)):
            self._waiting.put(line_of(facts.get("site")), rank, {**facts, "read": values["samples"]}, entry.time_ns)
        return ()

    def _gather_samples(self, by_rank: Mapping[int, Mapping[str, Any]]) -> bool:
        """True if ranks have, or may have, gathered something as long as a batch since the pass began."""
        logs = ((self._context.log(rank), facts) for rank, facts in by_rank.items())
        seen = list(islice(((log, facts) for log, facts in logs if log is not None), 2))
        if not seen:
            return not self._context.has_all_logs
        return any(_gathers_samples(log, facts) for log, facts in seen)

    def _finding(self, by_rank: dict[int, Any]) -> Finding | None:
        facts = next(iter(by_rank.values()))
        sampler, samples, read = facts["sampler"], facts["samples"], facts["read"]
        if repeated := _num_repeated(facts):
            said = f"makes {sampler['replicas']} equal parts of {samples} samples: the first {repeated} come again"
        else:
            repeated = _num_read_again(by_rank, self._context.world_size)
            said = f"gave each rank {read} samples of another part, together {repeated} more than there are"
        if not repeated or self._gather_samples(by_rank):
            return None
        return make_finding(
            "DDP405",
            summary=f"{repeated} of {samples} samples are evaluated twice",
            ranks=tuple(by_rank),
            line=place_of(facts.get("site")),
            evidence=(f"{sampler['kind']} {said}",),
            why="The metric counts these samples twice, and changes with the number of ranks.",
            fix="Give each rank its part without padding, as Subset(dataset, range(rank, len(dataset), world_size)), "
            "evaluate the unwrapped model, and sum metric and count over the ranks; loop.evaluate does all of that.",
        )


def _gathers_samples(log: RankLog, facts: Mapping[str, Any]) -> bool:
    later = [one for one in log.collectives if one.ddp is None and one.start_ns >= facts["begun_ns"]]
    batch = facts.get("size") or 1
    return any("gather" in one.op and _num_elements(one.inputs) >= batch for one in later)


def _num_repeated(facts: Mapping[str, Any]) -> int:
    sampler, samples = facts.get("sampler") or {}, facts.get("samples")
    replicas = sampler.get("replicas")
    if not samples or not replicas or sampler.get("drop_last") is not False:
        return 0
    if sampler.get("even_batches"):  # Accelerate's: each rank gets the same number of full batches
        part = 0 if sampler.get("split_batches") else replicas * (facts.get("size") or 0)
        return -samples % part if part else 0
    padding = -samples % replicas
    return padding if sampler.get("length") == math.ceil(samples / replicas) else 0


def _is_own_part(facts: Mapping[str, Any]) -> bool:
    """True if a sampler of the program's own takes a part of the dataset, and it is unknown which."""
    sampler, samples = facts.get("sampler") or {}, facts.get("samples")
    is_own = sampler.get("kind") not in _OF_TORCH and "even_batches" not in sampler
    return bool(samples and is_own and sampler.get("length") and sampler["length"] < samples)


def _num_read_again(by_rank: Mapping[int, Mapping[str, Any]], world_size: int) -> int:
    """Return the number of samples that the ranks read beyond the size of the dataset; 0 if that is not padding."""
    first = next(iter(by_rank.values()))
    if len(by_rank) < world_size or len({(facts["samples"], facts["read"]) for facts in by_rank.values()}) > 1:
        return 0
    orders = {facts.get("order") for facts in by_rank.values()}
    if None in orders or len(orders) < world_size:
        return 0  # ranks that read the same samples have no separate parts
    more = world_size * first["read"] - first["samples"]
    return more if 0 < more < world_size * (first.get("size") or 1) else 0


def _num_elements(tensors: Iterable[Any]) -> int:
    return max((math.prod(tensor.shape) for tensor in tensors), default=0)


class MeanOfMeans(WaitingRule):
    """Reports numbers that the ranks combine after an evaluation with unequal numbers of samples.

    These are averages of one number, and sums or gathers of one quotient whose denominator is the rank's own count.
    Gathered objects may be displayed one by one; they are reported only if the program takes their mean.
    """

    codes: tuple[str, ...] = ("DDP406",)
    kinds: tuple[str, ...] = ("collected",)
    waits_for_more = True  # until all ranks have had time to collect the counts

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._collected: BoundedDict[tuple[int, int, int], list[Any]] = BoundedDict(_MAX_PASSES)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        values = entry.values
        key = (values["loader"], values["pass"])
        mine = self._collected.setdefault((rank, *key), [])
        if len(mine) < 16:
            mine.append(values)
        self._waiting.put(key, rank, mine, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, Any]) -> Finding | None:
        return _find_mean_of_means(by_rank) if len(by_rank) == self._context.world_size else None


def _find_mean_of_means(by_rank: Mapping[int, list[Any]]) -> Finding | None:
    samples = {rank: values[0]["samples"] for rank, values in by_rank.items()}
    if len(set(samples.values())) == 1 or max(samples.values()) > _MAX_SAMPLES or min(samples.values()) < 1:
        return None
    if any(_is_count(one, samples[rank]) for rank, values in by_rank.items() for one in values):
        return None
    for number in range(min(len(values) for values in by_rank.values())):
        found = {rank: values[number] for rank, values in by_rank.items()}
        first = next(iter(found.values()))
        if any((one["op"], one["reduce"], one["numel"]) != (first["op"], first["reduce"], 1) for one in found.values()):
            continue
        if not all(one["averages"] for one in found.values()):
            continue
        if _is_average(found) or _are_quotients(found, samples):
            return _say_mean_of_means(found, samples)
        if _are_batch_means(found, samples):
            return _say_mean_of_means(found, samples, of_batches=True)
    return None


def _is_count(one: Mapping[str, Any], samples: int) -> bool:
    return one["numel"] != 1 or one["value"] is None or math.isclose(one["value"], samples)


def _is_average(found: Mapping[int, Any]) -> bool:
    return all(one["reduce"] == "avg" for one in found.values()) and any(one["value"] % 1 for one in found.values())


def _are_quotients(found: Mapping[int, Any], samples: Mapping[int, int]) -> bool:
    """True if the values are quotients by the ranks' own numbers of samples, and not by the total."""
    in_all = sum(samples.values())
    own = [one["value"] for rank, one in found.items() if _is_near_integer(one["value"] * samples[rank], 1e-3)]
    broken = [value for value in own if 0 < value < 1]
    of_all = [value for value in broken if _is_near_integer(value * in_all, 1e-2)]
    return len(own) == len(found) and len(broken) >= 2 and len(of_all) < len(broken)


def _are_batch_means(found: Mapping[int, Any], samples: Mapping[int, int]) -> bool:
    """True if each rank's value is the mean of its batches' means, with a smaller last batch."""
    in_all = sum(samples.values())
    num_sure = 0
    for rank, one in found.items():
        value, sizes, num = one["value"], one.get("sizes") or [0, 0, 0], one.get("batches", 0)
        whole, last = sizes[0], sizes[-1]
        if len(sizes) > 2 or whole * (num - 1) + last != samples[rank] or not 0 < value < 1:
            return False
        parts = num * math.lcm(whole, last)
        if parts > _MAX_SAMPLES or not _is_near_integer(value * parts, 1e-3):
            return False
        # A simple fraction may be any value, such as a ratio that the program has set.
        is_simple = Fraction(round(value * parts), parts).denominator <= whole
        is_other = any(_is_near_integer(value * number, 1e-2) for number in (samples[rank], in_all))
        num_sure += whole != last and not is_simple and not is_other
    return num_sure > 0


def _is_near_integer(value: float, tolerance: float) -> bool:
    return math.isfinite(value) and abs(value - round(value)) < tolerance


def _say_mean_of_means(found: Mapping[int, Any], samples: Mapping[int, int], *, of_batches: bool = False) -> Finding:
    first = next(iter(found.values()))
    true = sum(one["value"] * samples[rank] for rank, one in found.items()) / sum(samples.values())
    mean = sum(one["value"] for one in found.values()) / len(found)
    shown = list(found)[:8]
    return make_finding(
        "DDP406",
        summary=f"a mean over {render_ranks(found)} takes their means as equal, which are of unequal numbers of "
        "samples",
        ranks=tuple(found),
        line=place_of(first.get("site")),
        evidence=(
            *(f"rank {rank}: {found[rank]['value']:.6g} of {samples[rank]} samples" for rank in shown),
            *(
                f"on rank {rank} it is the mean over {found[rank]['batches']} batches of {found[rank]['sizes'][0]}, "
                f"the last of {found[rank]['sizes'][-1]}"
                for rank in (shown if of_batches else ())
            ),
            f"the mean of these is {mean:.6g}" + ("" if of_batches else f", that of all samples {true:.6g}"),
        ),
        why="A rank with few samples weighs as much as one with many"
        + (", and so does a batch with few." if of_batches else "."),
        fix="Reduce the sum and the number of samples over the ranks, and divide then.",
    )
