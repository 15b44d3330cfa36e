# SPDX-License-Identifier: Apache-2.0
"""Which samples a rank takes: all of them once, in the same batches at any world size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpilot.data.global_batches import Plan, check_weights, draw_permutation, draw_weighted
from ddpilot.errors import DataError

SHARES = st.lists(st.floats(0.25, 4.0), min_size=5, max_size=5)


def batches_of(plan: Plan, epoch: int) -> list[list[int]]:
    """Each global batch, put together from the pieces of all ranks in the order of the ranks."""
    divided = plan.epoch(epoch)
    found = []
    for batch in range(plan.num_batches):
        pieces = [divided.piece(batch, rank) for rank in range(plan.world_size)]
        found.append([int(number) for start, stop in pieces for number in divided.order[start:stop]])
    return found


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(0, 60),
    size=st.integers(40, 70) | st.integers(1, 12),
    batch_split=st.none() | SHARES,
    seed=st.integers(-5, 2**70),
    epoch=st.integers(0, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_plan_has_each_sample_of_an_epoch_once_in_the_same_batches_at_any_world_size(
    num_samples: int, size: int, batch_split: list[float] | None, seed: int, epoch: int, **flags: Any
) -> None:
    """The pieces of a global batch make up exactly `order[kB:(k + 1)B]`; no sample is lost but those of `drop_last`."""
    seen = []
    for world_size in range(1, 6):
        chosen = None if batch_split is None else batch_split[:world_size]
        try:
            plan = Plan(num_samples, size, world_size=world_size, seed=seed, batch_split=chosen, **flags)
        except DataError:
            # Refused, for one of the reasons that have tests of their own below.
            assert size < 40 or num_samples < size
            continue
        batches = batches_of(plan, epoch)
        order = plan.order(epoch).tolist()
        assert batches == [order[first : first + size] for first in range(0, len(order), size)][: plan.num_batches]
        assert sorted(order) == list(range(num_samples))
        assert sum(map(len, batches)) == (num_samples // size * size if flags["drop_last"] else num_samples)
        seen.append(batches)
    assert all(batches == seen[0] for batches in seen)


@settings(max_examples=60, deadline=None)
@given(num=st.integers(1, 50), world_size=st.integers(1, 5), size=st.integers(5, 50))
def test_plan_pieces_differ_by_one_sample_at_most(num: int, world_size: int, size: int) -> None:
    """A ragged last batch is divided as evenly as a full one, and a single sample is rank 0's."""
    plan = Plan(num, size, world_size=world_size)
    for batch in range(plan.num_batches):
        counts = plan.division.sizes(plan.batch_size(batch))
        assert max(counts) - min(counts) <= 1
        assert counts[0] == max(counts)


def test_plan_gives_each_rank_its_share() -> None:
    """Twice the share is twice the samples, also of a ragged last batch."""
    epoch = Plan(21, 12, world_size=2, batch_split=[2, 1]).epoch(0)
    assert [epoch.piece(batch, rank) for batch in (0, 1) for rank in (0, 1)] == [(0, 8), (8, 12), (12, 18), (18, 21)]


def test_plan_order_follows_from_seed_and_epoch_alone() -> None:
    """Seed and epoch change the order; world size and batch size do not. Future versions keep this order."""
    order = Plan(8, 4, world_size=2, seed=3, shuffle=True).order(5)
    assert order.tolist() == Plan(8, 8, world_size=1, seed=3, shuffle=True).order(5).tolist()
    assert order.tolist() == [0, 3, 4, 2, 6, 7, 5, 1]
    many = {tuple(Plan(50, 5, world_size=1, seed=s, shuffle=True).order(e)) for s in range(5) for e in range(5)}
    assert len(many) == 25


def test_plan_divides_each_batch_of_an_epoch_by_its_division() -> None:
    """`epoch` computes the pieces faster."""
    plan = Plan(23, 5, world_size=3, shuffle=True, batch_split=[1, 2, 1])
    epoch = plan.epoch(2)
    assert epoch.num_batches == plan.num_batches == 5
    for batch in range(5):
        assert epoch.batch_size(batch) == plan.batch_size(batch)
        pieces = [epoch.piece(batch, rank) for rank in range(3)]
        assert pieces[0][0] == batch * 5
        assert [stop - start for start, stop in pieces] == plan.division.sizes(plan.batch_size(batch))


def test_plan_draws_by_weight_the_same_at_any_world_size() -> None:
    """Draws follow the weights, and a sample with weight 0 is never drawn."""
    plans = [Plan(4, 10, world_size=size, seed=1, weights=[1, 0, 2, 1], num_draws=4000) for size in (1, 2, 5)]
    assert batches_of(plans[0], 3) == batches_of(plans[1], 3) == batches_of(plans[2], 3)
    counts = np.bincount(plans[0].order(3), minlength=4)
    assert counts[1] == 0
    assert np.abs(counts - [1000, 0, 2000, 1000]).max() < 150
    assert plans[0].has_repeats


def test_plan_draws_each_sample_once_without_replacement() -> None:
    """Samples with a weight are drawn once, heavier ones earlier on average."""
    plan = Plan(6, 2, world_size=2, weights=[1, 1, 0, 1, 9, 1], num_draws=5, replacement=False)
    firsts = [order[0] for order in (plan.order(epoch) for epoch in range(300)) if sorted(order) == [0, 1, 3, 4, 5]]
    assert len(firsts) == 300
    assert 170 < firsts.count(4) < 245  # 9 of 13 in expectation: 208
    assert not plan.has_repeats


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"global_batch_size": 2, "world_size": 3},
        "a global batch of 2 samples among 3 ranks: at least one rank would never",
    ),
    ({"batch_split": [100, 1], "global_batch_size": 4}, "`batch_split=[100.0, 1.0]` rank 1 would never have a sample"),
    ({"batch_split": [1]}, "`batch_split` is [1]. Give one number above 0 for each rank"),
    ({"batch_split": [1, 0]}, "`batch_split` is [1, 0]"),
    ({"num_samples": -1}, "`num_samples` is -1. Give at least 0"),
    ({"global_batch_size": 0}, "`global_batch_size` is 0"),
    ({"world_size": 0}, "`world_size` is 0"),
    ({"num_samples": 0, "shuffle": True}, "planning an epoch with `shuffle`: the dataset is empty"),
    ({"num_samples": 3, "drop_last": True}, "3 samples are less than one batch, so all of them would be dropped"),
    ({"num_draws": 3}, "`num_draws` is 3, without `weights`"),
    ({"weights": [1.0] * 9}, "`weights` has the shape (9,). Give one weight for each sample"),
    ({"weights": [1.0, -2.0] * 5}, "weights[1] is -2.0. A weight is finite and not negative"),
    ({"weights": [float("nan")] * 10}, "weights[0] is nan"),
    ({"weights": [0.0] * 10}, "0 samples have a weight above 0"),
    (
        {"weights": [1.0] * 5 + [0.0] * 5, "replacement": False},
        "5 samples have a weight above 0, and a sample can be drawn only",
    ),
]


def test_plan_refuses_what_it_cannot_divide() -> None:
    """The error states the numbers and the fix."""
    for arguments, words in REFUSED:
        with pytest.raises(DataError) as caught:
            Plan(**{"num_samples": 10, "global_batch_size": 5, "world_size": 2, **arguments})
        assert words in str(caught.value)
        assert caught.value.fix


def test_plan_of_an_empty_dataset_has_no_batches() -> None:
    """To evaluate nothing is no error."""
    assert Plan(0, 4, world_size=2).num_batches == 0


def test_plan_has_no_batch_and_no_sample_that_is_not_there() -> None:
    """A number out of range is our own mistake."""
    plan = Plan(10, 5, world_size=2)
    with pytest.raises(IndexError, match="batch 2 of an epoch of 2"):
        plan.batch_size(2)
    with pytest.raises(DataError, match="sample 10 of 10"):
        Plan(10, 5, world_size=2, sampler=lambda epoch: np.arange(1, 11)).order(0)


def test_plan_fingerprint_differs_when_ranks_would_train_on_other_batches() -> None:
    """Each argument counts; the same ones give the same text in every process."""
    same: dict[str, Any] = {"num_samples": 10, "global_batch_size": 5, "world_size": 2}
    others: list[dict[str, Any]] = [
        {"num_samples": 11},
        {"global_batch_size": 4},
        {"seed": 1},
        {"shuffle": True},
        {"drop_last": True},
        {"batch_split": [2, 3]},
        {"weights": [1.0] * 10},
        {"weights": [1.0] * 9 + [2.0]},
        {"sampler": lambda epoch: np.arange(10)[::-1]},
    ]
    found = [Plan(**{**same, **other}).fingerprint for other in ({}, *others)]
    assert len({*found}) == 10
    assert found[0] == Plan(**same, batch_split=[3, 3]).fingerprint == Plan(**same).fingerprint


WEIGHTS = st.lists(st.just(0.0) | st.floats(0, 1.7e308), min_size=1, max_size=20).filter(any)


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, num_draws=st.integers(1, 40), seed=st.integers(0, 2**64), epoch=st.integers(0, 99))
def test_draw_weighted_takes_only_samples_that_have_a_weight(
    weights: list[float], num_draws: int, seed: int, epoch: int
) -> None:
    """However small or large the weights are; without replacement each of them at most once."""
    drawable = {number for number, weight in enumerate(weights) if weight}
    array = check_weights(weights, len(weights), num_draws, True)
    drawn = draw_weighted(array, num_draws, True, seed, epoch).tolist()
    assert len(drawn) == num_draws
    assert {*drawn} <= drawable
    once = draw_weighted(array, min(num_draws, len(drawable)), False, seed, epoch).tolist()
    assert len({*once}) == len(once) == min(num_draws, len(drawable))
    assert {*once} <= drawable


def test_draw_permutation_puts_every_sample_everywhere() -> None:
    """Over many epochs each of six samples is about as often in each of six places."""
    places = np.zeros((6, 6), dtype=int)
    for epoch in range(3000):
        places[np.arange(6), draw_permutation(6, 0, epoch)] += 1
    assert abs(places - 500).max() < 100  # 4.9 standard deviations
    assert [draw_permutation(num, 0, 0).tolist() for num in (0, 1)] == [[], [0]]
