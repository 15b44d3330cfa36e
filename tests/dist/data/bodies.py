# SPDX-License-Identifier: Apache-2.0
"""What the ranks of these tests run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import ddpilot
from ddpilot.data.loaders import MapLoader, make_loader, make_stream_loader
from ddpilot.data.local_batch import LocalBatch
from ddpilot.errors import DataError
from tests.unit.data.samples import Augmented, Resumable, Stream, rows

SIZE = 5


def read_everything(num_workers: int) -> dict[str, Any]:
    """This rank's pieces of several kinds of epochs, each a list with one list of samples for each batch."""
    with ddpilot.init_group() as group:
        place = {"rank": group.rank, "world_size": group.world_size}
        options: dict[str, Any] = {**place, "global_batch_size": SIZE, "seed": 7, "num_workers": num_workers}
        shuffled = make_loader(Augmented(23), shuffle=True, **options)
        weighted = make_loader(Augmented(9), weights=[1.0, 5.0, 0.0] * 3, num_draws=12, **options)
        stream = make_stream_loader(Stream(17), **options)
        own = make_stream_loader(Stream(17, own=True), divides_itself=True, **options)
        return {
            "shuffled": read(shuffled.iterate(1)),
            "from batch 3": read(shuffled.iterate(1, 3)),
            "weighted": read(weighted.iterate(0)),
            "stream": read(stream.iterate(1)),
            "stream from batch 2": read(stream.iterate(1, 2)),
            "own": read(stop_together(own.iterate(0))),
            "own from batch 1": read(stop_together(own.iterate(0, 1))),
        }


def read(batches: Iterator[LocalBatch]) -> list[Any]:
    """The samples of each batch."""
    return [rows(batch.data) if batch.count else [] for batch in batches]


def stop_together(batches: Any) -> Iterator[LocalBatch]:
    """As in a loop: read until all ranks' pieces are empty. Collective."""
    for batch in batches:
        total = torch.tensor(batch.count)
        dist.all_reduce(total)
        if total.item() == 0:
            batches.close()
            return
        yield batch


class Broken(Dataset[Any]):
    """Sample 3 raises something that cannot be pickled."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> int:
        class LocalError(Exception):
            pass

        if number == 3:
            raise LocalError("no such picture")
        return number


class Deadly(Dataset[Any]):
    """Sample 3 ends the process, as the kernel does where memory runs out."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> int:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number


class Initialised(Dataset[Any]):
    """Returns the value that `worker_init_fn` set, and the number of reads of this copy."""

    worker = -1

    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> tuple[int, int]:
        self.num_read += 1
        return self.worker, self.num_read


def leave_a_mark(worker: int) -> None:
    """A `worker_init_fn`."""
    Initialised.worker = worker


def use_workers() -> dict[str, Any]:
    """What becomes of errors in workers, of their options, and of loops that stop early."""
    return {
        "broken": error_of(make_loader(Broken(), rank=0, world_size=1, global_batch_size=2, num_workers=1)),
        "killed": error_of(make_loader(Deadly(), rank=0, world_size=1, global_batch_size=2, num_workers=1)),
        "spawned": error_of(make_loader(LOCAL(), rank=0, world_size=1, global_batch_size=1, **SPAWN)),
        "persistent": read_twice(persistent=True),
        "fresh": read_twice(persistent=False),
        "early": leave_early(),
        "two at once": read_two_at_once(),
        "state": resume_with_workers(),
        "skewed": read_skewed(),
    }


SPAWN: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}


def LOCAL() -> Dataset[Any]:  # noqa: N802 - it stands for a class
    """A dataset of a class that other processes cannot import."""

    class Local(Broken):
        pass

    return Local()


def error_of(loader: MapLoader) -> tuple[str, str]:
    """The message of the error that an epoch ends in, and the class of its cause."""
    try:
        list(loader.iterate(0))
    except DataError as error:
        return str(error), type(error.__cause__).__name__
    return "no error", ""


def read_twice(persistent: bool) -> list[list[Any]]:
    """Two epochs of a loader with two workers, which keep their state in between if they are persistent."""
    loader = make_loader(
        Initialised(),
        rank=0,
        world_size=1,
        global_batch_size=1,
        num_workers=2,
        worker_init_fn=leave_a_mark,
        persistent_workers=persistent,
    )
    return [[row for batch in loader.iterate(epoch) for row in rows(batch.data)] for epoch in range(2)]


def leave_early() -> list[Any]:
    """After an epoch was left early, persistent workers start the next one at its first batch."""
    loader = make_loader(
        Augmented(12), rank=0, world_size=1, global_batch_size=2, num_workers=2, persistent_workers=True
    )
    stream = make_stream_loader(
        Stream(12), rank=0, world_size=1, global_batch_size=2, num_workers=2, persistent_workers=True
    )
    seen = []
    for made in (loader, stream):
        left = made.iterate(0)
        next(left)
        left.close()  # type: ignore[attr-defined]
        seen.append([row[0] for batch in made.iterate(0) for row in rows(batch.data)])
    return seen


def read_two_at_once() -> list[Any]:
    """Continue an epoch after a later one was started: with separate workers, and with persistent ones."""
    seen: list[Any] = []
    for persistent in (False, True):
        loader = make_loader(
            Augmented(4), rank=0, world_size=1, global_batch_size=2, num_workers=1, persistent_workers=persistent
        )
        first = loader.iterate(0)
        next(first)
        list(loader.iterate(1))
        try:
            seen.append([row[0] for row in rows(next(first).data)])
        except DataError as error:
            seen.append(str(error))
    return seen


def resume_with_workers() -> list[Any]:
    """A stream continues from the states that workers returned."""
    first, second = (
        make_stream_loader(Resumable(11), rank=0, world_size=1, global_batch_size=2, num_workers=2) for _ in range(2)
    )
    states = [batch.stream_state for batch in first.iterate(0)]
    end = list(second.iterate(0, 6, states[5]))
    return [states, end, [row[0] for batch in second.iterate(0, 3, states[2]) for row in rows(batch.data)]]


class Skewed(IterableDataset[Any]):
    """Divides itself: 1 sample for the first part, 6 for the second."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(1 if info.id == 0 else 6))


def read_skewed() -> list[int]:
    """How many samples each of the first batches has when one worker runs out long before the other."""
    batches = make_stream_loader(
        Skewed(), rank=0, world_size=1, global_batch_size=2, num_workers=2, divides_itself=True
    ).iterate(0)
    return [next(batches).count for _ in range(6)]
