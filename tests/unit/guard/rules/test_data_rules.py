# SPDX-License-Identifier: Apache-2.0
"""Rules about batches, samplers and shards: subgroups, order of arrival, and cases without proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from ddpilot.guard.rules.collectives import AllRanksSave
from ddpilot.guard.rules.data.evaluation import MeanOfMeans, PaddedEvaluation
from ddpilot.guard.rules.data.random_draws import SameRandomStreams
from ddpilot.guard.rules.data.set_epoch import SetEpochForgotten
from ddpilot.guard.rules.data.shards import SameBatch, ShardsOverlap, WorkersReadAlike
from ddpilot.guard.rules.data.unequal_lengths import UnequalBatches
from ddpilot.guard.rules.rule import Rule, RuleContext
from ddpilot.record.flight_ring.log import Collective, RankLog
from ddpilot.record.flight_ring.log import Tensor as LoggedTensor
from tests.unit.guard.rules.feeding import SECOND, SITE, Note, judge, loader_pass, make_entry, model


def inputs(rank: int, prints: list[int], elements: int = 32) -> list[Note]:
    """Inputs of the model on `rank`."""
    facts = {"model": 1, "elements": elements, "site": SITE}
    return [(rank, "input", {**facts, "forward": n, "checksum": p}) for n, p in enumerate(prints, 1)]


def make_log(*collectives: Collective, num_lost: int = 0) -> RankLog:
    """A ring that holds these."""
    times = {"started_ns": 0, "started_unix_ns": 0, "heartbeat_ns": None, "closed_ns": None}
    counts = {"num_begun": len(collectives) + num_lost, "num_torn": 0, "num_faults": 0, "first_fault": ""}
    about: dict[str, Any] = {"rank": 0, "pid": 1, "host": "", "torch": "", **times, **counts}
    return RankLog(collectives=collectives, **about)


def make_collective(op: str, numel: int = 1, start_ns: int = 2 * SECOND) -> Collective:
    """A collective that the program called."""
    tensor = LoggedTensor(dtype="float32", shape=(numel,), device="cpu")
    return Collective(index=1, op=op, operator="", group=None, seq=1, inputs=(tensor,), start_ns=start_ns)


def test_same_batch_is_told_of_the_ranks_that_share_it() -> None:
    """Two pairs of four ranks, as if the local rank was used as the rank on two nodes."""
    notes: list[Note] = [(rank, "ddp_model", model()) for rank in range(4)]
    for rank in (3, 0, 2, 1):
        notes += inputs(rank, [10 + rank % 2, 20 + rank % 2, 30 + rank % 2, 41, 51, 61 + rank % 2])
    found = judge(SameBatch, notes, world_size=4)
    assert [finding.ranks for finding in found] == [(0, 2), (1, 3)]
    assert {finding.severity for finding in found} == {"warning"}


@pytest.mark.parametrize(("draws", "severities"), [(False, []), (True, ["warning"])])
def test_same_batch_is_no_error_where_other_things_come_out(draws: bool, severities: list[str]) -> None:
    """Each rank selected its part inside the model, as of a sequence; or it drew at random, which is a warning."""
    notes: list[Note] = [(rank, "ddp_model", model()) for rank in (0, 1)]
    key = {"loader": 1, "pass": 1}
    for rank in (0, 1):
        notes.append((rank, "loader_pass", loader_pass()))
        for number in range(1, 7):
            facts = {"model": 1, "forward": number, "site": SITE}
            seen = {"elements": 32, "batch": number, **key}
            notes.append((rank, "batch", {**key, "batch": number, "checksum": number}))
            notes.append((rank, "input", {**facts, **seen, "checksum": number}))
            notes.append((rank, "random", {**facts, "before": 5, "after": 5 + draws, "output": 10 * number + rank}))
    assert [finding.severity for finding in judge(SameBatch, notes)] == severities


@pytest.mark.parametrize(
    ("loader", "fix"),
    [
        (loader_pass(), "Give DistributedSampler the number of ranks"),
        (loader_pass(samples=None) | {"sampler": None}, "Let the dataset's __iter__ skip the other"),
        (loader_pass(sampler={"kind": "RandomSampler", "replicas": None}), "Give the loader sampler="),
    ],
    ids=["sampler of another rank", "stream", "no sampler"],
)
def test_same_batch_says_what_can_be_done_with_such_a_loader(loader: dict[str, Any], fix: str) -> None:
    """A stream has no sampler, and a sampler that divides the samples needs no replacement."""
    notes: list[Note] = [(rank, "ddp_model", model()) for rank in (0, 1)]
    for rank in (0, 1):
        notes.append((rank, "loader_pass", loader))
        notes += [(rank, "batch", {"loader": 1, "pass": 1, "batch": n, "checksum": n}) for n in range(1, 7)]
        notes += [(rank, kind, {**facts, "loader": 1, "pass": 1}) for _, kind, facts in inputs(rank, [1, 2, 3, 4, 5])]
    (finding,) = judge(SameBatch, notes)
    assert finding.fix.startswith(fix)


@pytest.mark.parametrize(
    ("first", "second", "elements"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], 32),
        ([1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 2, 2], 32),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], 1),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 32),
    ],
    ids=["one differs", "hardly any differ from each other", "a number", "few, and made by hand"],
)
def test_same_batch_is_not_told_without_proof(first: list[int], second: list[int], elements: int) -> None:
    """Each of them can happen in a correct program."""
    notes: list[Note] = [(rank, "ddp_model", model()) for rank in (0, 1)]
    assert judge(SameBatch, notes + inputs(0, first, elements) + inputs(1, second, elements)) == []


def test_same_batch_is_not_compared_between_models_of_other_groups() -> None:
    """Ranks 0 and 1 hold two parts of one model that is split: each is alone in its group of copies."""
    notes: list[Note] = [(rank, "ddp_model", model(ranks=[rank, rank + 2])) for rank in (0, 1)]
    for rank in (0, 1):
        notes += inputs(rank, [1, 2, 3, 4, 5, 6])
    assert judge(SameBatch, notes, world_size=4) == []


def pass_of(number: int, order: int, *, epoch: int = 0, num_batches: int = 4, is_sorted: bool = False) -> list[Note]:
    """One pass on rank 0 that trains model 1."""
    key = {"loader": 1, "pass": number}
    return [
        (0, "loader_pass", loader_pass(number, sampler={"epoch": epoch})),
        (0, "order", {**key, "order": order, "sorted": is_sorted}),
        (0, "trains", {**key, "model": 1, "join": False}),
        (0, "batch", {**key, "batch": num_batches, "checksum": 1}),
        (0, "pass_end", {**key, "samples": 2 * num_batches, "evaluates": False}),
    ]


def test_set_epoch_is_missed_in_the_second_pass_in_a_row() -> None:
    """The finding names line, epoch and seed."""
    (finding,) = judge(SetEpochForgotten, pass_of(1, 7) + pass_of(2, 7))
    assert finding.place is not None
    assert finding.place.line == 20
    assert "epoch 0" in finding.summary


def test_set_epoch_is_missed_in_long_passes_that_are_left_early() -> None:
    """The first pass has a new optimizer, as every training; the second one does not."""
    notes = [
        *pass_of(1, 7, num_batches=8)[:-1],
        (0, "parameter_set", {"parameter_set": 1}),
        *pass_of(2, 7, num_batches=8)[:-1],
    ]
    assert [finding.code for finding in judge(SetEpochForgotten, notes)] == ["DDP402"]


@pytest.mark.parametrize(
    "notes",
    [
        pass_of(1, 7) + pass_of(2, 8, epoch=1),
        pass_of(1, 7, num_batches=1) + pass_of(2, 7),
        pass_of(1, 7, is_sorted=True) + pass_of(2, 7, is_sorted=True),
        pass_of(1, 7) + pass_of(2, 8, epoch=1) + pass_of(3, 7),
        [*pass_of(1, 7), (0, "load", {"group": "world", "ordinal": "/0", "site": SITE}), *pass_of(2, 7)],
        [*pass_of(1, 7), *pass_of(2, 7)[:-1], (0, "parameter_set", {"parameter_set": 2}), *pass_of(2, 7)[-1:]],
    ],
    ids=[
        *("called", "one batch was looked at", "in order", "a second training from the beginning"),
        *("the first weights are loaded", "a new optimizer"),
    ],
)
def test_set_epoch_is_not_missed_in_right_programs(notes: list[Note]) -> None:
    """No message."""
    assert judge(SetEpochForgotten, notes) == []


def samplers(*facts: dict[str, Any], world_size: int = 2) -> list[Note]:
    """A pass that trains, on one rank for each of the `facts` of samplers."""
    notes: list[Note] = []
    for rank, one in enumerate(facts):
        replicas = {"replicas": world_size, "rank": rank}
        notes.append((rank, "ddp_model", model()))
        notes.append((rank, "loader_pass", loader_pass(sampler={**replicas, **one})))
        notes.append((rank, "trains", {"loader": 1, "pass": 1, "model": 1, "join": False}))
    return notes


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"rank": 0}, {"rank": 0}, "ranks 0,1 read the same part"),
        ({"replicas": 4}, {"replicas": 4}, "4 parts for 2 ranks"),
        ({"seed": 0}, {"seed": 1}, "seed differs"),
        ({"epoch": 3}, {"epoch": 0}, "epoch differs"),
    ],
)
def test_parts_that_do_not_fit_are_told_from_the_samplers(
    first: dict[str, Any], second: dict[str, Any], said: str
) -> None:
    """Before a sample is read twice."""
    (finding,) = judge(ShardsOverlap, samplers(first, second))
    assert said in finding.summary


def test_parts_of_several_subsets_are_told() -> None:
    """As after random_split with a different seed on each rank."""
    notes = samplers({}, {})
    for number, (_, kind, values) in enumerate(notes):
        if kind == "loader_pass":
            values["part"] = number
    (finding,) = judge(ShardsOverlap, notes)
    assert "different subsets" in finding.summary


def test_parts_are_right_where_samplers_agree_or_do_not_shuffle() -> None:
    """A different epoch does not matter if the sampler does not shuffle."""
    assert judge(ShardsOverlap, samplers({}, {})) == []
    assert judge(ShardsOverlap, samplers({"shuffle": False}, {"shuffle": False, "epoch": 5})) == []


def stream(prints: list[int], workers: int, rank: int = 0) -> list[Note]:
    """Batches that workers return in turn."""
    key = {"loader": 1, "pass": 1}
    begun = (rank, "loader_pass", {**loader_pass(workers=workers), "sampler": None})
    return [begun, *((rank, "batch", {**key, "batch": n, "checksum": p}) for n, p in enumerate(prints, 1))]


@pytest.mark.parametrize(("prints", "workers"), [([1, 1, 2, 2, 3, 3], 2), ([1, 1, 1, 2, 2, 2], 3)])
def test_workers_that_read_the_same_stream_are_told(prints: list[int], workers: int) -> None:
    """For both ranks at once."""
    (finding,) = judge(WorkersReadAlike, stream(prints, workers) + stream(prints, workers, rank=1))
    assert finding.code == "DDP403"
    assert finding.ranks == (0, 1)
    assert finding.summary.startswith(f"each batch is read {workers} times")


@pytest.mark.parametrize(
    ("prints", "workers"),
    [([1, 1, 2, 2, 3, 4], 2), ([1, 1, 1, 1, 1, 1], 2), ([1, 1, 2, 2], 2), ([1, 1, 2, 2, 3, 3], 1), ([1, 2, 1, 2], 2)],
    ids=["one differs", "constant", "few", "one worker", "each its own"],
)
def test_workers_are_not_told_without_proof(prints: list[int], workers: int) -> None:
    """Each of them can happen in a correct program."""
    assert judge(WorkersReadAlike, stream(prints, workers)) == []


def lengths(*numbers: int | None, joins: bool = False) -> list[Note]:
    """Ranks with equally many batches, the first one near its end."""
    notes: list[Note] = []
    for rank, number in enumerate(numbers):
        key = {"loader": 1, "pass": 1}
        notes.append((rank, "ddp_model", model()))
        notes.append((rank, "loader_pass", loader_pass(length=number)))
        notes.append((rank, "trains", {**key, "model": 1, "join": joins}))
    return [*notes, (0, "near_end", {"loader": 1, "pass": 1})]


def test_unequal_batches_are_told_before_the_end() -> None:
    """If the ring shows that the program itself calls no collectives."""
    (finding,) = judge(UnequalBatches, lengths(5, 6), log=lambda rank: make_log())
    assert finding.ranks == (0,)
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    ("notes", "log"),
    [
        (lengths(5, 5), make_log()),
        (lengths(5, 6, joins=True), make_log()),
        (lengths(5, None), make_log()),
        (lengths(5, 6), make_log(make_collective("all_reduce"))),
        (lengths(5, 6), make_log(num_lost=1)),
        (lengths(5, 6), None),
    ],
    ids=["equal", "joined", "unknown", "agreed", "an older one may have agreed", "no ring"],
)
def test_unequal_batches_are_not_told_where_the_ranks_may_have_agreed(notes: list[Note], log: RankLog | None) -> None:
    """No message."""
    assert judge(UnequalBatches, notes, log=lambda rank: log) == []


def test_unequal_batches_are_not_told_where_the_loader_is_begun_anew() -> None:
    """A loop with a fixed number of steps does not end with the loader; the source is a cell."""
    text = "while step < total:\n    for x, y in loader:\n        if step == total:\n            break\n"
    notes = [(rank, kind, {**values}) for rank, kind, values in lengths(5, 6)]
    for _, kind, values in notes:
        if kind == "loader_pass":
            values["site"] = {**SITE, "file": "<cell>", "line": 2}
    assert judge(UnequalBatches, notes, log=lambda rank: make_log(), sources={"<cell>": text}) == []
    assert judge(UnequalBatches, notes, log=lambda rank: make_log(), sources={"<cell>": text[:-10] + "pass"})


def evaluation(samples: int, **sampler: Any) -> list[Note]:
    """A whole pass without gradients."""
    facts = loader_pass(samples=samples, sampler={"length": -(-samples // 2), **sampler})
    end = {"loader": 1, "pass": 1, "samples": 8, "evaluates": True}
    return [(0, "loader_pass", facts), (0, "pass_end", end)]


def test_padding_is_told_where_sums_are_reduced_and_not_where_samples_are_gathered() -> None:
    """Gathered samples may have been truncated."""
    sums = make_log(make_collective("all_reduce", 2), make_collective("all_gather", 1))
    (finding,) = judge(PaddedEvaluation, evaluation(15), log=lambda rank: sums)
    assert finding.summary == "1 of 15 samples are evaluated twice"
    gathered = make_log(make_collective("all_gather", 8))
    assert judge(PaddedEvaluation, evaluation(15), log=lambda rank: gathered) == []
    assert judge(PaddedEvaluation, evaluation(16)) == []
    assert judge(PaddedEvaluation, evaluation(15, drop_last=True)) == []


def test_padding_is_not_told_of_a_loader_that_trains() -> None:
    """It may be read once more, as for the statistics of BatchNorm."""
    sums = make_log(make_collective("all_reduce", 2))
    trained: Note = (0, "trains", {"loader": 1, "pass": 1, "model": 1, "join": False})
    assert judge(PaddedEvaluation, [trained, *evaluation(15)], log=lambda rank: sums) == []


def own_evaluation(read: int, orders: tuple[int, int | None], kind: str = "EvalSampler") -> list[Note]:
    """Two ranks with a sampler without attributes; `read`: how many of 15 samples each gets."""
    notes: list[Note] = []
    for rank, order in enumerate(orders):
        facts = loader_pass(samples=15)
        facts["sampler"] = {"kind": kind, "length": read, "has_set_epoch": False}
        key = {"loader": 1, "pass": 1}
        notes.append((rank, "loader_pass", facts))
        notes += [(rank, "order", {**key, "order": order, "sorted": True})] if order is not None else []
        notes.append((rank, "pass_end", {**key, "samples": read, "evaluates": True}))
    return notes


@pytest.mark.parametrize(
    ("notes", "summaries"),
    [
        (own_evaluation(8, (1, 2)), ["1 of 15 samples are evaluated twice"]),
        (own_evaluation(9, (1, 2)), ["3 of 15 samples are evaluated twice"]),
        (own_evaluation(7, (1, 2)), []),
        (own_evaluation(10, (1, 2)), []),
        (own_evaluation(8, (1, 1)), []),
        (own_evaluation(8, (1, None)), []),
        (own_evaluation(8, (1, 2), kind="SubsetRandomSampler"), []),
        (own_evaluation(8, (1, 2))[:3], []),
    ],
    ids=["a part", "full batches", "fewer", "many more", "same fold", "order unknown", "torch's", "one rank"],
)
def test_padding_by_a_sampler_of_ones_own_is_told_by_what_was_read(notes: list[Note], summaries: list[str]) -> None:
    """Parts with slightly more samples in total than the dataset; not a fold that each rank reads."""
    sums = make_log(make_collective("all_reduce", 2))
    assert [finding.summary for finding in judge(PaddedEvaluation, notes, log=lambda rank: sums)] == summaries
    gathered = make_log(make_collective("all_gather", 8))
    assert judge(PaddedEvaluation, notes, log=lambda rank: gathered) == []


def test_padding_by_full_batches_is_told() -> None:
    """Accelerate's: all ranks get the same number of full batches."""
    even = {"even_batches": True, "split_batches": False, "length": 2}
    sums = make_log(make_collective("all_gather", 1))
    (finding,) = judge(PaddedEvaluation, evaluation(7, **even), log=lambda rank: sums)
    assert finding.summary == "1 of 7 samples are evaluated twice"
    assert judge(PaddedEvaluation, evaluation(8, **even), log=lambda rank: sums) == []
    gathered = make_log(make_collective("all_gather", 2))
    assert judge(PaddedEvaluation, evaluation(7, **even), log=lambda rank: gathered) == []


def collected(rank: int, samples: int, *values: float, reduce: str = "sum", averages: bool = True) -> list[Note]:
    """Numbers that `rank` reduces after an evaluation of `samples`."""
    facts = {"loader": 1, "pass": 1, "op": "all_reduce", "reduce": reduce, "numel": 1, "site": SITE}
    facts["averages"] = averages
    return [(rank, "collected", {**facts, "value": value, "samples": samples}) for value in values]


def test_a_mean_of_means_is_told_by_its_denominators() -> None:
    """Of 3 and 7 samples, with the evidence."""
    (finding,) = judge(MeanOfMeans, collected(0, 3, 2 / 3) + collected(1, 7, 3 / 7))
    assert finding.evidence[-1] == "the mean of these is 0.547619, that of all samples 0.5"
    assert judge(MeanOfMeans, collected(0, 3, 1.234, reduce="avg") + collected(1, 7, 2.345, reduce="avg"))
    by_chance = collected(0, 110, 37 / 110) + collected(1, 40, 12 / 40)  # as 45 of all 150
    assert judge(MeanOfMeans, by_chance)


@pytest.mark.parametrize(
    "notes",
    [
        collected(0, 3, 2 / 3) + collected(1, 3, 1 / 3),
        collected(0, 3, 2 / 10) + collected(1, 7, 3 / 10),
        collected(0, 3, 2.0, 3.0) + collected(1, 7, 3.0, 7.0),
        collected(0, 3, 2 / 3, 3.0) + collected(1, 7, 3 / 7, 7.0),
        collected(0, 3, 1.234) + collected(1, 7, 2.345),
        collected(0, 3, 2 / 3, averages=False) + collected(1, 7, 3 / 7, averages=False),
    ],
    ids=["equal parts", "of the count of all", "sums and counts", "with counts", "sums of losses", "shown one by one"],
)
def test_a_mean_of_means_is_not_told_where_it_may_be_none(notes: list[Note]) -> None:
    """No message."""
    assert judge(MeanOfMeans, notes) == []


def save(rank: int, start_s: float, *, host: str = "a", path: str = "/x.pt") -> Note:
    """`rank` writes for half a second."""
    times = {"start_ns": int(start_s * SECOND), "end_ns": int((start_s + 0.5) * SECOND)}
    return (rank, "save", {"path": path, "host": host, **times, "site": SITE})


def test_saves_to_one_file_are_told_and_others_are_not() -> None:
    """On two machines, minutes apart, or with two names they are correct."""
    (finding,) = judge(AllRanksSave, [save(0, 10), save(1, 12)])
    assert finding.ranks == (0, 1)
    assert judge(AllRanksSave, [save(0, 10), save(1, 12, host="b")]) == []
    assert judge(AllRanksSave, [save(0, 10), save(1, 60)]) == []
    assert judge(AllRanksSave, [save(0, 10), save(1, 10, path="/y.pt")]) == []
    assert judge(AllRanksSave, [save(0, 10), save(0, 11)]) == []


def trial(number: int) -> Iterator[Note]:
    """A new model with a new loader, as in a search over hyperparameters."""
    place = {"loader": number, "pass": 1}
    for rank in (0, 1):
        yield rank, "ddp_model", model() | {"model": number}
        yield rank, "loader_pass", loader_pass() | {"loader": number, "length": 4 + rank}
        yield rank, "trains", {**place, "model": number, "join": False}
        yield rank, "order", {**place, "order": 1, "sorted": False}
        yield rank, "shard", {**place, "pairs": [(1, 2)]}
        yield rank, "near_end", place
        yield rank, "draws", {**place, "library": "torch", "worker": -1, "fetch": 1, "before": 1}
        for forward in range(1, 5):
            yield rank, "batch", {**place, "batch": forward, "checksum": forward}
            drawn = {"before": 1 + rank * forward // 4, "after": 9, "drawn": 9, "library": "torch", "output": None}
            yield rank, "random", {"model": number, "forward": forward, **drawn}
            yield rank, "input", {"model": number, "forward": forward, "checksum": 10 * rank + forward, "elements": 32}


@pytest.mark.parametrize("make", [SameBatch, SameRandomStreams, UnequalBatches, ShardsOverlap, SetEpochForgotten])
def test_what_is_kept_of_many_models_is_bounded(make: Callable[[RuleContext], Rule]) -> None:
    """A search that wraps a model for each trial takes no more memory after 4,000 trials than after 3,000."""

    def size_of(value: object) -> int:
        inner = (
            value.values() if isinstance(value, Mapping) else vars(value).values() if hasattr(value, "__dict__") else ()
        )
        own = len(value) if isinstance(value, Mapping | set | list) else 0
        return own + sum(size_of(one) for one in inner if not isinstance(one, RuleContext))

    rule = make(RuleContext(world_size=2))
    sizes = []
    for number in range(1, 4001):
        for rank, kind, values in trial(number):
            if kind in rule.kinds:
                list(rule.feed(rank, make_entry(kind, values)))
        if number in (3000, 4000):
            sizes.append(size_of(rule))
    assert sizes[0] == sizes[1] > 0


def batch_means(*values: float) -> list[Note]:
    """Numbers that two ranks reduce after an evaluation of 19 and 18 samples, in batches of 8."""
    sizes = ([8, 3], 19), ([8, 2], 18)
    return [
        (rank, kind, {**facts, "batches": 3, "sizes": sizes[rank][0]})
        for rank, value in enumerate(values)
        for _, kind, facts in collected(rank, sizes[rank][1], value)
    ]


def test_a_mean_of_batch_means_is_told_by_its_denominators() -> None:
    """Not for a simple fraction, which may be any ratio, nor for a different denominator."""
    first, second = (3 / 8 + 4 / 8 + 2 / 3) / 3, (2 / 8 + 5 / 8 + 1 / 2) / 3
    (finding,) = judge(MeanOfMeans, batch_means(first, second))
    assert "3 batches of 8, the last of 3" in finding.evidence[2]
    assert judge(MeanOfMeans, batch_means(0.75, 0.5)) == []
    assert judge(MeanOfMeans, batch_means(first, 0.3456)) == []
