# SPDX-License-Identifier: Apache-2.0
"""Datasets for the tests of the loaders, and helpers that read them on all ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ddpilot.data.local_batch import LocalBatch


class Counted(Dataset[Any]):
    """Sample n is n; counts the samples read."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.num_read = 0

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, number: int) -> Any:
        self.num_read += 1
        return (number,)


class Augmented(Counted):
    """Sample n is n and three random numbers."""

    def __getitem__(self, number: int) -> tuple[int, float, float, float]:
        self.num_read += 1
        return number, random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))


class Stream(IterableDataset[Any]):
    """The numbers from 0 on, each with a random one; with `own`, this worker's part of them."""

    def __init__(self, num: int, own: bool = False) -> None:
        self.num = num
        self.own = own
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, float]]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if self.own and info else (0, 1)
        for number in range(first, self.num, step):
            yield number, random.random() + self.epoch


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return self.num


class Resumable(IterableDataset[Any]):
    """A stream with a state; counts the samples read."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.position = 0
        self.num_read = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[int]:
        while self.position < self.num:
            self.position += 1
            self.num_read += 1
            yield self.position - 1
        self.position = 0


def rows(data: Any) -> list[Any]:
    """The samples of a batch of columns, as tuples."""
    columns = data if isinstance(data, list | tuple) else [data]
    return [*zip(*(column.tolist() for column in columns), strict=True)]


def read_world(loaders: Sequence[Any], epoch: int = 0, first_batch: int = 0) -> list[list[Any]]:
    """The global batches, joined from all ranks' loaders; joint loaders stop when all pieces are empty."""
    iterators = [loader.iterate(epoch, first_batch) for loader in loaders]
    batches = []
    for pieces in zip(*iterators, strict=True):
        check_counts(pieces)
        if all(piece.count == 0 for piece in pieces):
            break
        batches.append([row for piece in pieces if piece.count for row in rows(piece.data)])
    for iterator in iterators:
        iterator.close()
    return batches


def check_counts(pieces: Sequence[LocalBatch]) -> None:
    """Check the counts and indices of the pieces of a batch."""
    for piece in pieces:
        assert piece.index == pieces[0].index
        assert piece.count == len(piece.sample_ids)
        assert piece.data is None or len(rows(piece.data)) == piece.count
        assert piece.global_count in (None, sum(one.count for one in pieces))
