# SPDX-License-Identifier: Apache-2.0
"""Rules about random streams, BatchNorm, non-finite values, graphs and devices."""

from __future__ import annotations

from typing import Any

import pytest

from ddpilot.guard.rules.collectives import OnGraph
from ddpilot.guard.rules.data.random_draws import SameRandomStreams
from ddpilot.guard.rules.data.shards import SameBatch
from ddpilot.guard.rules.ddp_use import GradientsMissing
from ddpilot.guard.rules.devices import OneDevice, SeveralDevices
from ddpilot.guard.rules.numerics import NotFinite, SmallBatchNorm
from ddpilot.guard.rules.rule import RuleContext, no_log
from tests.unit.guard.rules.feeding import SECOND, SITE, Note, judge, make_entry, model


def forwards(rank: int, states: list[tuple[int, int]], *, drawn: int = 0, library: str = "torch") -> list[Note]:
    """States of the generator before and after forwards of `rank`; `drawn` numbers for each batch."""
    facts = {"model": 1, "library": library, "drawn": drawn, "site": SITE}
    return [(rank, "random", {**facts, "forward": n, "before": a, "after": b}) for n, (a, b) in enumerate(states, 1)]


def test_streams_are_told_where_all_ranks_draw_from_the_same_state() -> None:
    """Three times, in the model: an info."""
    models: list[Note] = [(rank, "ddp_model", model()) for rank in (0, 1)]
    states = [(1, 2), (2, 3), (3, 4)]
    (finding,) = judge(SameRandomStreams, models + forwards(0, states) + forwards(1, states))
    assert finding.severity == "info"
    assert finding.ranks == (0, 1)


@pytest.mark.parametrize(("drawn", "library", "num_found"), [(8, "torch", 1), (7, "torch", 0), (8, "torch.cuda", 0)])
def test_draws_for_a_batch_are_told_where_they_are_many(drawn: int, library: str, num_found: int) -> None:
    """One number may be shared on purpose, and the model may use a different generator than the batch."""
    notes: list[Note] = [(rank, "ddp_model", model()) for rank in (0, 1)]
    for rank in (0, 1):
        notes += forwards(rank, [(1, 1), (2, 2), (3, 3)], drawn=drawn, library=library)
    found = judge(SameRandomStreams, notes)
    assert ["outside of the model" in finding.summary for finding in found] == [True] * num_found


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([(1, 1), (1, 1), (1, 1), (1, 1)], [(1, 1), (1, 1), (1, 1), (1, 1)]),
        ([(1, 2), (2, 3)], [(1, 2), (2, 3)]),
        ([(1, 2), (2, 3), (3, 4)], [(1, 2), (5, 6), (3, 4)]),
        ([(1, 2), (2, 3), (3, 4)], [(1, 1), (2, 2), (3, 3)]),
    ],
    ids=["nothing is drawn", "twice", "one state differs", "one rank draws nothing"],
)
def test_streams_are_not_told_without_draws(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    """The same seed alone is correct."""
    models: list[Note] = [(rank, "ddp_model", model()) for rank in (0, 1)]
    assert judge(SameRandomStreams, models + forwards(0, first) + forwards(1, second)) == []


def draws(rank: int, worker: int, states: list[int], *, trains: bool = True) -> list[Note]:
    """States of numpy before what `worker` (-1: the rank itself) drew for its batches."""
    key = {"loader": 1, "pass": 1}
    facts = {**key, "worker": worker, "library": "numpy", "site": SITE}
    notes: list[Note] = [(rank, "ddp_model", model())]
    notes += [(rank, "trains", {**key, "model": 1, "join": False})] * trains
    return notes + [(rank, "draws", {**facts, "fetch": n, "before": s}) for n, s in enumerate(states, 1)]


def test_streams_are_told_where_samples_are_read_alike() -> None:
    """In the ranks, in workers of two ranks, and in two workers of one; not in evaluation, nor if states differ."""
    assert judge(SameRandomStreams, draws(0, -1, [1, 2, 3]) + draws(1, -1, [1, 2, 3]))[0].severity == "warning"
    assert "workers" in judge(SameRandomStreams, draws(0, 0, [1, 2, 3]) + draws(1, 0, [1, 2, 3]))[0].summary
    alike = judge(SameRandomStreams, draws(0, 0, [1, 2]) + draws(0, 1, [1, 2]))
    assert [finding.ranks for finding in alike] == [(0,)]
    assert judge(SameRandomStreams, draws(0, -1, [1, 2, 3]) + draws(1, -1, [1, 5, 3])) == []
    assert judge(SameRandomStreams, draws(0, 0, [1, 2]) + draws(0, 1, [3, 4])) == []
    unused = [note for rank in (0, 1) for note in draws(rank, -1, [1, 2, 3], trains=False)]
    assert judge(SameRandomStreams, unused) == []


@pytest.mark.parametrize(("rows", "is_told"), [([15, 15, 4], True), ([16, 16, 4], False), ([32, 32, 32], False)])
def test_batch_norm_is_told_below_16_samples(rows: list[int], is_told: bool) -> None:
    """The largest of three batches counts: the last of an epoch may be smaller."""
    notes: list[Note] = [(0, "norms", {"model": 1, "layers": ["1"], "rows": rows, "site": SITE})]
    assert bool(judge(SmallBatchNorm, notes)) == is_told


def at(backward: int, training: int = 1, generation: str = "a") -> dict[str, Any]:
    """The fields of a backward."""
    return {"generation": generation, "training": training, "backward": backward}


def bad(rank: int, backward: int, loss: str = "nan", **when: Any) -> Note:
    """Loss, or with an empty one the gradient, of `rank` is not finite."""
    where = {"loader": 1, "pass": 2, "batch": 7, "indices": [3, 4]}
    return (rank, "not_finite", {**at(backward, **when), "loss": loss, "site": SITE, **where})


def spoiled(rank: int, backward: int, device: str = "cpu", group: str = "world", **when: Any) -> Note:
    """The step after `backward` made weights of `rank` non-finite."""
    where = {"device": device, "group": group, "site": SITE}
    return (rank, "spoiled", {**at(backward, **when), "parameters": ["0.weight"], **where})


def read(rank: int, kind: str, backward: int, **when: Any) -> Note:
    """What `rank` has "checked", or left "unchecked"."""
    return (rank, kind, at(backward, **when))


def test_what_is_not_finite_is_told_of_the_rank_that_was_first() -> None:
    """In any order of entries; other ranks notice it one backward later."""
    notes = [bad(0, 6), spoiled(0, 6), bad(1, 5), spoiled(1, 5)]
    for order in (notes, notes[::-1], [notes[2], notes[3], notes[0], notes[1]]):
        (finding,) = judge(NotFinite, order)
        assert finding.ranks == (1,)
        assert finding.evidence[0] == (
            "rank 1: the loss was nan in backward 5, batch 7 of pass 2 over the loader, samples 3, 4"
        )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_first_rank_is_told_if_its_note_came_without_that_of_the_step(device: str) -> None:
    """A rank that ended before its device had the number: it reads it when it exits, and checks no weights then."""
    (finding,) = judge(NotFinite, [bad(0, 6), spoiled(0, 6, device), bad(1, 5), bad(1, 6)])
    assert finding.ranks == (1,)
    assert "it began on rank 1" in finding.summary


def test_no_rank_is_told_to_be_the_first_if_numbers_of_a_device_are_missing() -> None:
    """Rank 1 may have seen it in a backward before, and been killed; of a number on the CPU, it would have noted it."""
    (finding,) = judge(NotFinite, [bad(0, 6), spoiled(0, 6, "cuda")])
    assert "it began" not in finding.summary
    assert "values of rank 1 are missing; it may have begun there earlier" in finding.evidence
    (finding,) = judge(NotFinite, [bad(0, 6), spoiled(0, 6)])
    assert "it began on rank 0" in finding.summary


@pytest.mark.parametrize(
    ("notes", "is_known"),
    [
        ([read(1, "checked", 6)], True),
        ([read(1, "checked", 5)], False),
        ([bad(1, 7)], True),
        ([read(1, "unchecked", 6), bad(1, 7)], False),
        ([read(1, "unchecked", 5), bad(1, 7)], True),
    ],
    ids=["all read", "not all read", "a later one", "one left out", "an earlier one left out"],
)
def test_a_rank_that_made_no_weights_non_finite_is_known_to_be_later(notes: list[Note], is_known: bool) -> None:
    """If it has read all numbers of its device up to that backward, as it does when it exits after the last step."""
    for order in ([bad(0, 6), spoiled(0, 6, "cuda"), *notes], [*notes, bad(0, 6), spoiled(0, 6, "cuda")]):
        (finding,) = judge(NotFinite, order)
        assert ("it began on rank 0" in finding.summary) == is_known
        assert ("values of rank 1 are missing; it may have begun there earlier" in finding.evidence) == (not is_known)


def test_no_rank_is_the_only_first_if_another_left_out_that_backward() -> None:
    """Also if the latter noted the next backward, which belongs to the same step."""
    notes = [bad(0, 6), bad(0, 7), spoiled(0, 7, "cuda"), read(1, "unchecked", 6), bad(1, 7), spoiled(1, 7, "cuda")]
    (finding,) = judge(NotFinite, notes)
    assert "it began" not in finding.summary
    many = [read(1, "unchecked", number) for number in range(6, 200)]
    (finding,) = judge(NotFinite, [bad(0, 6), spoiled(0, 6, "cuda"), *many, bad(1, 200)])
    assert "it began" not in finding.summary


def test_the_first_rank_is_told_if_a_value_of_the_same_backward_was_left_out() -> None:
    """Its loss was read, its gradient was not."""
    (finding,) = judge(NotFinite, [read(0, "unchecked", 6), bad(0, 6), spoiled(0, 6, "cuda"), read(1, "checked", 6)])
    assert "it began on rank 0" in finding.summary


def test_the_first_rank_is_told_if_its_entries_of_the_next_process_group_are_read_before_those_of_others() -> None:
    """As all entries of a rank are, when a past job is read."""
    rule = NotFinite(RuleContext(world_size=2, log=no_log, sources=dict))
    for rank, first in ((0, 6), (1, 7)):
        for _, kind, values in (bad(rank, first), spoiled(rank, first), read(rank, "checked", 3, generation="b")):
            rule.feed(rank, make_entry(kind, values, SECOND))
    (finding,) = rule.look(10 * SECOND)
    assert "since backward 6; it began on rank 0" in finding.summary


def test_the_first_rank_is_told_if_others_notice_it_with_the_next_model() -> None:
    """A model that is wrapped anew for each epoch, in the last step of one."""
    (finding,) = judge(NotFinite, [bad(0, 100), spoiled(0, 100), bad(1, 1, training=2), spoiled(1, 1, training=2)])
    assert finding.ranks == (0,)
    assert "since backward 100; it began on rank 0" in finding.summary


def test_no_rank_is_told_to_be_the_first_if_the_process_group_changed() -> None:
    """Rank 1 was started again; what it, or its predecessor, noted before is not compared."""
    notes = [bad(0, 6), spoiled(0, 6), bad(1, 7, generation="b"), spoiled(1, 7, generation="b")]
    (finding,) = judge(NotFinite, notes)
    assert finding.ranks == (0, 1)
    assert "it began" not in finding.summary
    assert "where it began is not known" in finding.evidence[0]


@pytest.mark.parametrize("restarted", [(0, 1), (0,)])
def test_what_was_noted_before_the_process_group_changed_is_not_taken_for_now(restarted: tuple[int, ...]) -> None:
    """The same backward was not finite on rank 1 then, and rank 1 had read more than now."""
    before = [bad(1, 6), read(0, "checked", 50), read(1, "checked", 50)]
    now = [bad(0, 6, generation="b"), spoiled(0, 6, "cuda", generation="b")]
    reached = [read(1, "checked", 5, generation="b")] * (1 in restarted)
    (finding,) = judge(NotFinite, [*before, *now, *reached])
    assert finding.ranks == (0,)
    assert "it began" not in finding.summary
    assert "values of rank 1 are missing; it may have begun there earlier" in finding.evidence


def test_values_are_missing_of_a_rank_in_any_of_the_groups() -> None:
    """Rank 3 was killed, and the lowest rank is in another group; a rank outside of all groups is not waited for."""
    notes = [
        note for rank in (0, 1, 2) for note in (bad(rank, 6), spoiled(rank, 6, "cuda", "0,2" if rank != 1 else "1,3"))
    ]
    rule = NotFinite(RuleContext(world_size=5, log=no_log, sources=dict))
    for rank, kind, values in notes:
        rule.feed(rank, make_entry(kind, values, SECOND))
    (finding,) = rule.look(10 * SECOND)
    assert "it began" not in finding.summary
    assert "values of rank 3 are missing; it may have begun there earlier" in finding.evidence


def test_what_is_not_finite_is_told_of_its_first_backward_in_an_accumulated_step() -> None:
    """The step came after the third of them; no finding if no step made weights non-finite."""
    (finding,) = judge(NotFinite, [bad(0, 9, loss=""), bad(0, 10), bad(0, 11), spoiled(0, 11)])
    assert "since backward 9" in finding.summary
    assert "its gradient was not" in finding.evidence[0]
    assert judge(NotFinite, [bad(0, 9), bad(1, 9)]) == []


def test_what_is_not_finite_is_told_of_each_training() -> None:
    """Once for all ranks, also if one of them did not notice the first time."""
    rule = NotFinite(RuleContext(world_size=2, log=no_log, sources=dict))
    found: list[list[tuple[int, ...]]] = []
    for notes in ([bad(0, 6), spoiled(0, 6)], [bad(0, 9), bad(1, 9), spoiled(0, 9), spoiled(1, 9)]):
        now_ns = SECOND * (len(found) + 1)
        for rank, kind, values in notes:
            rule.feed(rank, make_entry(kind, values, now_ns))
        found.append([finding.ranks for finding in rule.look(now_ns + 6 * SECOND)])
    assert found == [[(0,)], [(0, 1)]]


def test_a_reduced_tensor_on_the_graph_is_told_by_its_line() -> None:
    """Two lines give two findings; the same line on two ranks gives one."""
    facts = {"op": "all_reduce", "numel": 1, "losses": 2}
    other = {**SITE, "line": 30}
    notes: list[Note] = [(rank, "on_graph", {**facts, "case": "sum", "site": SITE}) for rank in (0, 1)]
    notes.append((0, "on_graph", {**facts, "case": "backward", "site": other}))
    found = judge(OnGraph, notes)
    assert [(finding.ranks, finding.place and finding.place.line) for finding in found] == [((0, 1), 20), ((0,), 30)]


def gpu(rank: int, uuid: str, num_devices: int, host: str = "here") -> Note:
    """A rank's part of the model on a GPU."""
    return (rank, "ddp_model", model(device="cuda:0", uuid=uuid, num_devices=num_devices, host=host, site=SITE))


def test_ranks_on_one_device_are_told() -> None:
    """A warning if other devices are idle, an info if there is only one; different machines and the CPU are correct."""
    assert [f.severity for f in judge(OneDevice, [gpu(0, "a", 2), gpu(1, "a", 2)])] == ["warning"]
    assert [f.severity for f in judge(OneDevice, [gpu(0, "a", 1), gpu(1, "a", 1)])] == ["info"]
    assert judge(OneDevice, [gpu(0, "a", 2), gpu(1, "b", 2)]) == []
    assert judge(OneDevice, [gpu(0, "a", 1), gpu(1, "a", 1, host="there")]) == []
    assert judge(OneDevice, [(0, "ddp_model", model()), (1, "ddp_model", model())]) == []


def test_tensors_on_several_devices_are_told_by_name() -> None:
    """As the exception ends the rank."""
    names = {"cuda:0": ["output"], "cpu": ["target"]}
    notes: list[Note] = [(1, "devices", {"by_device": names, "message": "RuntimeError: same device", "site": SITE})]
    (finding,) = judge(SeveralDevices, notes)
    assert finding.evidence == ("on cpu: target", "on cuda:0: output", "RuntimeError: same device")


def test_parameters_that_were_left_out_are_told_by_name() -> None:
    """torch names their indices."""
    notes: list[Note] = [(1, "left_out", {"names": ["head.weight", "head.bias"], "num": 2, "site": SITE})]
    (finding,) = judge(GradientsMissing, notes)
    assert finding.summary == "2 parameters took no part in the backward pass: head.weight, head.bias"
    assert finding.ranks == (1,)
    (finding,) = judge(GradientsMissing, [*notes, (0, *notes[0][1:])])
    assert finding.ranks == (0, 1)


def test_parameters_that_were_frozen_late_are_told_by_name_and_number() -> None:
    """The first of many."""
    notes: list[Note] = [(0, "frozen", {"names": [f"layer{at}" for at in range(7)], "num": 40, "site": SITE})]
    (finding,) = judge(GradientsMissing, notes)
    said = "40 parameters were frozen after the model was wrapped: layer0, layer1, layer2, layer3, layer4 and 35 more"
    assert (finding.code, finding.summary) == ("DDP310", said)
    notes = [(0, "frozen", {"names": ["layer0"], "num": 1, "site": SITE})]
    (finding,) = judge(GradientsMissing, notes)
    assert finding.summary == "1 parameter was frozen after the model was wrapped: layer0"


def test_rules_keep_bounded_state_over_a_long_job() -> None:
    """Thousands of notes without a finding."""
    rule: Any = SameBatch(RuleContext(world_size=2))
    for rank in (0, 1):
        rule.feed(rank, make_entry("ddp_model", model()))
    for number in range(2_000):
        for rank in (0, 1):
            facts = {"model": 1, "elements": 32, "site": SITE, "forward": number, "checksum": 5}
            list(rule.feed(rank, make_entry("input", facts)))
    assert len(rule._inputs[1]) < 100
