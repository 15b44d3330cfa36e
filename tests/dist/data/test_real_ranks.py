# SPDX-License-Identifier: Apache-2.0
"""Loaders on real ranks with workers: together they read what one process reads without workers."""

from __future__ import annotations

from typing import Any

import pytest

from ddpilot import Launcher
from tests.dist.data.bodies import SIZE, read_everything, use_workers
from tests.preload import PRELOAD


def launch(num_ranks: int, fn: Any, *args: Any) -> list[Any]:
    """What every rank returned, in at most 100 seconds."""
    return list(Launcher(nproc_per_node=num_ranks, timeout_s=100, preload=PRELOAD).run(fn, *args))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one rank without workers reads."""
    return launch(1, read_everything, 0)[0]  # type: ignore[no-any-return]


def put_together(pieces: list[dict[str, Any]], kind: str) -> list[Any]:
    """Global batches of the pieces that the ranks read of them."""
    return [[row for part in parts for row in part] for parts in zip(*(one[kind] for one in pieces), strict=True)]


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(2, 2), (4, 1)])
def test_ranks_with_workers_read_what_one_process_reads(
    alone: dict[str, Any], num_ranks: int, num_workers: int
) -> None:
    """The same samples, augmented alike, in the same global batches; ranks that run out unequally stop together."""
    pieces = launch(num_ranks, read_everything, num_workers)
    for kind in ("shuffled", "from batch 3", "weighted", "stream", "stream from batch 2"):
        assert put_together(pieces, kind) == alone[kind], kind
    assert alone["shuffled"][3:] == alone["from batch 3"]
    assert alone["stream"][2:] == alone["stream from batch 2"]
    assert sorted(row[0] for batch in alone["shuffled"] for row in batch) == list(range(23))
    assert max(len(batch) for batch in alone["shuffled"]) == SIZE
    own = put_together(pieces, "own")
    assert sorted(row[0] for batch in own for row in batch) == list(range(17))
    assert put_together(pieces, "own from batch 1") == own[1:]


def test_workers_end_and_continue_as_torchs_do() -> None:
    """Errors name the sample, also those that cannot travel; options are kept; an epoch that was left is over."""
    (seen,) = launch(1, use_workers)
    message, cause = seen["broken"]
    assert message.startswith("[rank 0] reading sample 3 (batch 1 of epoch 0): RuntimeError: Caught ")
    assert "no such picture" in message
    assert "Inspect `dataset[3]`" in message
    assert cause == "RuntimeError"
    message, cause = seen["killed"]
    assert message.startswith("[rank 0] reading batch ")
    assert "DataLoader worker (pid" in message
    assert "ddpilot explain DDP607" in message
    assert cause == "RuntimeError"
    message, cause = seen["spawned"]
    assert message.startswith("[rank 0] starting 1 workers by `spawn`, which pickles dataset and functions: ")
    assert "Define them at the top of a module" in message
    assert "Local" in message
    assert seen["persistent"] == [[(0, 1), (1, 1), (0, 2), (1, 2)], [(0, 3), (1, 3), (0, 4), (1, 4)]]
    assert seen["fresh"] == [[(0, 1), (1, 1), (0, 2), (1, 2)]] * 2
    assert seen["early"] == [list(range(12))] * 2
    assert seen["two at once"][0] == [2, 3]
    assert "`persistent_workers` read one epoch at a time. Create a second loader" in seen["two at once"][1]
    states, end, rest = seen["state"]
    assert [state["position"] for state in states[:5]] == [2, 4, 6, 8, 10]
    assert (states[5], end) == (None, [])
    assert rest == [6, 7, 8, 9, 10]
    assert seen["skewed"] == [1, 2, 2, 2, 0, 0]  # an empty batch in between might end the epoch for all ranks
