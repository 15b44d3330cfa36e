# SPDX-License-Identifier: Apache-2.0
"""Observe random draws while samples are read, in this process and in DataLoader workers."""

from __future__ import annotations

import mmap
import random
import sys
import zlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch as torch_fetch

from ddpilot.guard.notes import DrawsNote
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.data.position import Pass, Position
from ddpilot.record.accelerator import can_copy_from

_BLOCK_WORDS = 624
LIBRARIES = ("python", "numpy", "torch")


def digest_of(library: str) -> int:
    """Digest of the global generator of `library`; 0 only if it was never used in this process."""
    if library == "torch":
        return zlib.crc32(torch.get_rng_state().numpy().tobytes()) + 1
    if library == "python":
        return hash(random.getstate()[1]) & 0xFFFFFFFF | 1 << 32
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or "numpy.random" not in sys.modules:
        return 0
    _, key, position, _, _ = numpy.random.get_state()
    return zlib.crc32(key.tobytes(), position) + 1


def words_between(before: torch.Tensor, after: torch.Tensor) -> int:
    """Lower bound on the number of words that torch's CPU generator produced between two of its states."""
    (first, block), (last, other) = _take_apart(before), _take_apart(after)
    return max(0, last - first) if block == other else max(0, _BLOCK_WORDS - first) + last


def _take_apart(state: torch.Tensor) -> tuple[int, bytes]:
    """Return the position of a Mersenne Twister in its block of words, and the block. torch's state has this layout."""
    data = state.numpy().tobytes()
    return int.from_bytes(data[16:24], sys.byteorder), data[24 : 24 + 8 * _BLOCK_WORDS]


def device_digest(device: torch.device) -> tuple[str, int]:
    """Return the name of the generator that dropout on `device` draws from, and its digest. The host keeps its state.

    Must not be called while a device graph is captured, as the generator must not be read then.
    """
    module: Any = torch.get_device_module(device) if can_copy_from(device.type) else None
    if not hasattr(module, "get_rng_state"):
        return "torch", digest_of("torch")
    return f"torch.{device.type} on {device}", zlib.crc32(module.get_rng_state(device).numpy().tobytes()) + 1


_NUM_FETCHES = 4
_MAX_WORKERS = 64
_MAX_PASSES = 2
_NUM_READS = 12
_WORDS = _MAX_WORKERS * _NUM_FETCHES * len(LIBRARIES)


class DrawObserver:
    """The part of the data probe that observes fetching.

    Forked workers write what they observe into memory that they share with their rank, and nothing else.
    """

    def __init__(self, notes: Notes, position: Position) -> None:
        self._notes = notes
        self._position = position
        self._num_fetched: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._pages: WeakKeyDictionary[Pass, memoryview] = WeakKeyDictionary()
        self._page: memoryview | None = None
        self._read: WeakKeyDictionary[Pass, tuple[int, set[int]]] = WeakKeyDictionary()

    def install(self) -> list[Callable[[], None]]:
        around = self._notes.around
        kinds = (torch_fetch._MapDatasetFetcher, torch_fetch._IterableDatasetFetcher)
        return [around(kind, "fetch", before=self._fetches, returned=self._fetched) for kind in kinds]

    def share(self, found: Pass) -> None:
        """Share memory with the workers of `found`, which are about to be started, or are reused for a further pass."""
        if found.number > 1:
            self._page = None
            return
        page = mmap.mmap(-1, 8 * _WORDS)
        self._pages[found] = self._page = memoryview(page).cast("Q")

    def collect(self, found: Pass) -> None:
        """Note what the workers of `found` have written since the last call."""
        page = self._pages.get(found)
        num_reads, known = self._read.get(found, (0, set()))
        if page is None or num_reads > _NUM_READS:
            return
        self._read[found] = (num_reads + 1, known)
        for at, value in enumerate(page):
            if value and at not in known:
                known.add(at)
                worker, rest = divmod(at, _NUM_FETCHES * len(LIBRARIES))
                fetch, library = divmod(rest, len(LIBRARIES))
                self._write(found, worker, fetch + 1, library, value)

    def _write(self, found: Pass, worker: int, fetch: int, library: int, before: int) -> None:
        name = LIBRARIES[library]
        note = DrawsNote(**found.key, worker=worker, fetch=fetch, library=name, before=before, site=found.site)
        self._notes.write("draws", note)

    def _fetches(self, fetcher: Any, _: Any) -> tuple[int, list[int]] | None:
        number = self._num_fetched.get(fetcher, 0) + 1
        if number > _NUM_FETCHES:
            return None
        self._num_fetched[fetcher] = number
        found = self._position.fetching
        if get_worker_info() is None and (found is None or found.number > _MAX_PASSES):
            return None
        return number, [digest_of(library) for library in LIBRARIES]

    def _fetched(self, begun: tuple[int, list[int]] | None, *_: Any) -> None:
        if begun is None:
            return
        number, before = begun
        worker, found = get_worker_info(), self._position.fetching
        for library, digest in enumerate(before):
            if not digest or digest_of(LIBRARIES[library]) == digest:
                continue
            if worker is None and found is not None:
                self._write(found, -1, number, library, digest)
            elif worker is not None and worker.id < _MAX_WORKERS and self._page is not None:
                self._page[(worker.id * _NUM_FETCHES + number - 1) * len(LIBRARIES) + library] = digest
