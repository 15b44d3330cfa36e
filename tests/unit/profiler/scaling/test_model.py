# SPDX-License-Identifier: Apache-2.0
"""The model of scaling on programs whose durations are known."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from ddpilot.profiler.scaling.model import Link, SizeSample, expected_wait, exposed, fit_model

LINK = Link(latency_s=0.001, bytes_per_s=1e9)
BUCKETS = (1_000_000,) * 4
WINDOW_S = 0.012


def sample(num_ranks: int, *, batch: float = 8.0, own_s: float = 0.020, is_fair: bool = True) -> SizeSample:
    """A program with this own work, whose exchange is that of `LINK`, and whose ranks are equally fast."""
    exposed_s = exposed(BUCKETS, LINK, num_ranks, WINDOW_S)
    return SizeSample(
        num_ranks=num_ranks,
        batch=batch,
        update_s=own_s + exposed_s,
        own_s=own_s,
        waiting_s=0.0,
        exposed_s=exposed_s,
        called_s=0.0,
        window_s=WINDOW_S,
        draws_s=numpy.full(100, own_s),
        buckets=BUCKETS,
        link=LINK if num_ranks > 1 else None,
        is_fair=is_fair,
    )


def test_an_all_reduce_has_the_steps_and_bytes_of_a_ring() -> None:
    """Two times three steps of a quarter of the bytes on four ranks; none on one."""
    assert LINK.all_reduce_s(4, 4e6) == pytest.approx(6 * (0.001 + 0.001))
    assert LINK.all_reduce_s(1, 4e6) == 0.0


def test_buckets_cost_what_does_not_fit_into_the_backward_pass() -> None:
    """The last bucket always does; buckets that are slower than the backward pass queue up."""
    fast = Link(latency_s=0.0, bytes_per_s=1e9)  # a bucket takes 1 ms on two ranks, and one is ready every 4 ms
    assert exposed(BUCKETS, fast, 2, WINDOW_S) == pytest.approx(0.001)
    slow = Link(latency_s=0.003, bytes_per_s=1e12)  # 6 ms each: the fourth ends 24 ms after the first was ready
    assert exposed(BUCKETS, slow, 2, WINDOW_S) == pytest.approx(0.024 - WINDOW_S, rel=0.01)
    assert exposed(BUCKETS, None, 2, WINDOW_S) == exposed((), slow, 2, WINDOW_S) == 0.0


def test_the_prediction_of_a_program_that_follows_the_model_is_exact() -> None:
    """Fitted at 1 and 2 ranks, and at 2 alone."""
    for fitted in ([sample(1), sample(2)], [sample(2)]):
        found = fit_model(fitted).predict(4, 8.0)
        assert found.update_s == pytest.approx(sample(4).update_s, rel=0.01)
        assert found.own_s == pytest.approx(0.020)


def test_what_buckets_take_longer_in_the_program_than_alone_is_fitted() -> None:
    """The exchange takes 1.5 times what the micro-benchmark says, at all numbers of ranks."""
    slower = exposed(BUCKETS, LINK, 2, WINDOW_S, 1.5)
    model = fit_model([sample(1), replace(sample(2), exposed_s=slower, update_s=0.020 + slower)])
    assert model.bucket_factor == pytest.approx(1.5, rel=0.01)
    assert model.predict(4, 8.0).exposed_s == pytest.approx(exposed(BUCKETS, LINK, 4, WINDOW_S, 1.5), rel=0.01)


def test_numbers_of_ranks_that_share_cores_are_not_fitted() -> None:
    """Their work takes longer than on a machine with a core for each."""
    model = fit_model([sample(1), sample(2), sample(4, own_s=0.080, is_fair=False)])
    assert model.fitted == (1, 2)
    assert model.predict(4, 8.0).own_s == pytest.approx(0.020)


def test_the_group_may_be_measured_at_the_number_that_is_held_out() -> None:
    """One rank exchanges nothing."""
    found = fit_model([sample(1)], link_of=sample(2)).predict(2, 8.0)
    assert found.update_s == pytest.approx(sample(2).update_s, rel=0.01)


def test_strong_scaling_has_a_constant_part_of_the_work() -> None:
    """10 ms, and 1.25 ms for each sample."""
    model = fit_model([sample(1, batch=16, own_s=0.030), sample(2, batch=8, own_s=0.020)])
    assert model.constant_s == pytest.approx(0.010)
    assert model.sample_s == pytest.approx(0.00125)
    assert model.predict(4, 4).own_s == pytest.approx(0.015)


def test_ranks_wait_for_the_slowest_draw() -> None:
    """Of two draws from 10 and 20 ms, three quarters of the time one is 20 ms: 17.5 on average, and 15 alone."""
    draws_s = numpy.array([0.010, 0.020] * 50)
    assert expected_wait(draws_s, 1) == pytest.approx(0.0)
    assert expected_wait(draws_s, 2) == pytest.approx(0.0025)
    model = fit_model([replace(sample(2), draws_s=draws_s, waiting_s=0.005)])
    assert model.waiting_factor == pytest.approx(2.0)
    assert model.predict(4, 8.0).waiting_s == pytest.approx(2 * expected_wait(draws_s, 4))


def test_the_smallest_batch_that_gains_is_found() -> None:
    """From it on, and not with one sample fewer, the efficiency is reached."""
    model = fit_model([sample(1, own_s=0.002), sample(2, own_s=0.002)])
    batch = model.smallest_batch(2, 1, 0.8)
    assert batch is not None

    def efficiency(batch: int) -> float:
        return model.predict(2, batch).samples_per_s / model.predict(1, batch).samples_per_s / 2

    assert efficiency(batch) >= 0.8 > efficiency(batch - 1)
    assert fit_model([replace(sample(2), batch=0.0)]).smallest_batch(2, 1, 0.99) is None
