# SPDX-License-Identifier: Apache-2.0
"""When garbage is collected, and that Python's own way is back afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from ddpilot.trainer.callbacks.garbage_collection import GarbageCollection
from tests.unit.trainer.callbacks.fits import Each, fit, make_trainer


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
