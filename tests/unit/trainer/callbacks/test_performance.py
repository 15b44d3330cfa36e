# SPDX-License-Identifier: Apache-2.0
"""Where the time of an epoch goes, and which rank is slow."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ddpilot.errors import LoopError
from ddpilot.trainer.callbacks.performance import PARTS, GarbageCollection, Timers, find_slow, render_times
from ddpilot.training.progress import WaitClock
from tests.unit.trainer.callbacks.fits import Each, fit, make_trainer

ROW = {
    "epoch": 2,
    "data": [0.1, 0.1, 0.5],
    "forward": [1.0, 1.1, 1.0],
    "update": [2.0, 2.0, 2.0],
    "save": [0.0, 0.0, 0.0],
    "evaluate": [0.3] * 3,
}


def test_find_slow_compares_a_rank_with_the_median_of_the_other_ranks() -> None:
    """1.5 s against 1.15 s; no rank within the factor, and none with one rank."""
    ((rank, times),) = find_slow(ROW, 1.3)
    assert rank == 2
    assert times == pytest.approx(1.5 / 1.15)
    assert find_slow(ROW, 1.4) == []
    assert find_slow({**ROW, "data": [5.0], "forward": [5.0]}, 1.1) == []
    assert find_slow({**ROW, "data": [0.0, 1.0], "forward": [0.0, 0.0]}, 2.0) == [(1, float("inf"))]
    assert find_slow({**ROW, "update": [9.0] * 3}, 1.3) == []  # nobody would notice
    brief = {part: [0.0, 0.0] for part in PARTS}
    assert find_slow({**brief, "forward": [0.005, 0.018]}, 1.3) == []  # nor this


def test_render_times_is_a_line() -> None:
    """The maximum of each part, and the slow rank's data and forward."""
    assert render_times(ROW, 1.3) == (
        "epoch 2: data 0.5 s, forward 1.1 s, update 2 s, save 0 s, evaluate 0.3 s; "
        "rank 2 is slow: data 0.5 s and forward 1 s, 1.3 times the median of the other ranks"
    )


class Slow(nn.Linear):
    """Its forward takes time that shows in training, and in evaluation too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As of a linear layer."""
        end_s = time.perf_counter() + 0.004
        while time.perf_counter() < end_s:
            pass
        return super().forward(x)


def test_timers_divide_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    """The parts add up to at most the epoch, each has its own time, and the model has no hooks left."""
    timers, spans = Timers(), []
    trainer = make_trainer(
        Each("on_epoch_start", lambda run: spans.append(time.perf_counter())),
        timers,
        Each("on_epoch_end", lambda run: spans.append(time.perf_counter())),
    )
    trainer.model = model = Slow(2, 1)
    trainer.optimizers = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    fit(trainer, 2)
    for row, begin_s, end_s in zip(timers.rows, spans[::2], spans[1::2], strict=True):
        assert list(row) == ["epoch", *PARTS]
        assert row["forward"][0] >= 0.012
        assert row["evaluate"][0] >= 0.012
        assert all(row[part][0] >= 0 for part in PARTS)
        assert sum(row[part][0] for part in PARTS) <= end_s - begin_s
    assert trainer.history.epochs[1]["time"] == {part: timers.rows[1][part][0] for part in PARTS}
    said = capsys.readouterr().out
    assert "epoch 1: data " in said
    assert "time" not in said  # it is no metric
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_timers_leave_no_hook_when_training_fails() -> None:
    """The notebook's model has no hooks left."""

    def fail(run: Any) -> None:
        raise ValueError("as a user's callback may")

    trainer = make_trainer(Timers(say=False), Each("on_epoch_end", fail))
    with pytest.raises(ValueError, match="as a user's"):
        fit(trainer)
    assert not trainer.model._forward_hooks
    with pytest.raises(LoopError, match="`slow` is 1"):
        Timers(slow=1)


def test_wait_clock_counts_waiting_only_and_closes_its_iterator() -> None:
    """What the consumer does between items is no waiting; a loop that is left ends the generator."""
    ended = []

    def items() -> Any:
        try:
            for item in range(3):
                end_s = time.perf_counter() + 0.002
                while time.perf_counter() < end_s:
                    pass
                yield item
        finally:
            ended.append(True)

    clock, spent_s = WaitClock(), 0.0
    begin_s = time.perf_counter()
    for _ in clock.over(items()):
        work_s = time.perf_counter()
        sum(range(20_000))
        spent_s += time.perf_counter() - work_s
    assert 0.006 <= clock.total_s <= time.perf_counter() - begin_s - spent_s
    iterator = clock.over(items())
    assert next(iterator) == 0
    iterator.close()  # type: ignore[attr-defined]
    assert ended == [True, True]


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that are collected, in order."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_garbage_collection_is_at_fixed_updates_and_ends_of_epochs(collections: list[int]) -> None:
    """And at no other time, regardless of allocations; automatic collection is restored after the fit."""

    def allocate(run: Any) -> None:
        [[] for _ in range(100_000)]
        collections.append(-run.update)

    trainer = make_trainer(Each("on_update_end", allocate), GarbageCollection(every=2))
    start = Each("on_epoch_start", lambda run: collections.clear())
    trainer.callbacks.append(start)
    trainer.callbacks.append(Each("on_epoch_end", lambda run: collections.append(100 + run.epoch)))
    frozen = gc.get_freeze_count()
    fit(trainer, validate=False)
    assert gc.get_freeze_count() == frozen
    assert collections[: collections.index(100)] == [-1, -2, 1, -3, 2]
    assert gc.isenabled()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_is_as_before_when_training_fails(was_enabled: bool) -> None:
    """Automatic collection is restored to its previous state."""

    def fail(run: Any) -> None:
        assert not gc.isenabled()
        raise ValueError("as a user's callback may")

    if not was_enabled:
        gc.disable()
    try:
        with pytest.raises(ValueError, match="as a user's"):
            fit(make_trainer(GarbageCollection(), Each("on_update_end", fail)))
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()


def test_garbage_collection_keeps_objects_that_other_code_has_frozen() -> None:
    """As ranks have from the server that they were forked from."""
    seen: list[int] = []
    gc.freeze()
    try:
        fit(make_trainer(GarbageCollection(), Each("on_update_end", lambda run: seen.append(gc.get_freeze_count()))))
        assert min(seen) > 0
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
