# SPDX-License-Identifier: Apache-2.0
"""Describe a DataLoader: number of batches, dataset, sampler and order, and a sketch of the samples read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler

from ddpilot.guard.notes import LoaderPassNote, PassKey, Site
from ddpilot.guard.probes.tensors import fingerprint_rows

_MAX_DIGESTED = 256
_SIZES = ("num_replicas", "world_size", "num_processes")
_RANKS = ("rank", "process_index")


def is_looked_at(loader: Any) -> bool:
    """True for a DataLoader that is not one of ddpilot's own, which divide samples themselves.

    False also for objects that stand in for a DataLoader in torch's iterators, such as fastai's, which do not describe
    their data.
    """
    return DataLoader in type(loader).__mro__ and not type(loader.dataset).__module__.startswith("ddpilot.")


def describe_loader(loader: DataLoader[Any], key: PassKey, site: Site) -> LoaderPassNote:
    """Return the note for a pass; None for what cannot be determined without side effects."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    sampler = None if is_stream else _describe_sampler(loader)
    part, whole = (None, None) if is_stream else _find_part(loader)
    sizes = (loader.batch_size, getattr(loader.batch_sampler, "batch_size", None))
    return LoaderPassNote(
        **key,
        # A stream's length, once read, makes torch warn if the stream is longer.
        length=None if is_stream else length_of(loader),
        samples=None if is_stream else length_of(loader.dataset),
        dataset=type(loader.dataset).__name__,
        size=next((size for size in sizes if isinstance(size, int)), None),
        workers=loader.num_workers,
        sampler=sampler,
        part=None if part is None else _digest(part),
        share=None if part is None or whole is None else [len(part), whole],
        site=site,
    )


def may_repeat(loader: DataLoader[Any]) -> bool:
    """True if ranks are meant to draw their own order: with replacement, or a part of the dataset."""
    for sampler in _samplers_of(loader):
        num_asked = getattr(sampler, "_num_samples", None)
        if getattr(sampler, "replacement", False) or num_asked is not None or hasattr(sampler, "weights"):
            return True
    return False


def _find_part(loader: Any) -> tuple[Any, int | None]:
    """Return the indices of a `Subset` or `SubsetRandomSampler` and the size of the whole dataset, or (None, None)."""
    indices: Any
    if type(loader.dataset) is Subset:
        indices, whole = loader.dataset.indices, loader.dataset.dataset
    else:
        sampler = next((one for one in _samplers_of(loader) if type(one) is SubsetRandomSampler), None)
        indices, whole = getattr(sampler, "indices", None), loader.dataset
    # Splits of other libraries are mostly arrays. Arrays on a GPU are excluded, as reading them would require a wait.
    is_array = getattr(indices, "ndim", None) == 1 and not getattr(indices, "is_cuda", False)
    is_known = (is_array or isinstance(indices, list | tuple | range)) and len(indices) > 0
    return (indices, length_of(whole)) if is_known else (None, None)


def _digest(indices: Any) -> int:
    """A checksum of some of the indices."""
    stride = max(1, len(indices) // _MAX_DIGESTED)
    return zlib.crc32(str([int(one) for one in indices[::stride]]).encode())


def length_of(thing: Any) -> int | None:
    """`len(thing)`; None if that fails."""
    try:
        return len(thing)
    except Exception:  # noqa: BLE001 - the user's code, which may never have been called
        return None


def _samplers_of(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a loader from the outside in: batch samplers and the samplers that they wrap."""
    todo, seen = [loader.batch_sampler, loader.sampler], 0
    while todo and seen < 8:
        sampler = todo.pop(0)
        seen += 1
        if sampler is not None:
            yield sampler
            todo += [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]


def _describe_sampler(loader: Any) -> dict[str, Any]:
    samplers = list(_samplers_of(loader))
    for sampler in samplers:
        sizes = [value for name in _SIZES if type(value := getattr(sampler, name, None)) is int]
        ranks = [value for name in _RANKS if type(value := getattr(sampler, name, None)) is int]
        if sizes and ranks:
            return {**_facts(sampler), "replicas": sizes[0], "rank": ranks[0]}
    inner = next((one for one in samplers if not hasattr(one, "sampler") and not hasattr(one, "batch_sampler")), None)
    return _facts(inner)


def _facts(sampler: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": type(sampler).__name__, "length": length_of(sampler)}
    for name in ("epoch", "seed"):
        if type(value := getattr(sampler, name, None)) is int:
            facts[name] = value
    for name in ("shuffle", "drop_last", "even_batches", "split_batches"):
        if isinstance(value := getattr(sampler, name, None), bool):
            facts[name] = value
    facts["has_set_epoch"] = callable(getattr(sampler, "set_epoch", None))
    return facts


NUM_CHOSEN = 64
_MAX_PARTS = 4
_STEP = 0x9E3779B1


class Sketch:
    """Fingerprints of the content of up to 64 samples of `dataset`, of `num_samples`, as far as this rank reads them.

    For a `Subset`, samples of the underlying dataset.
    """

    def __init__(self, dataset: Any, num_samples: int) -> None:
        # Subsets that ranks create themselves have their own indices; the underlying dataset's are common to all ranks.
        self._parts: list[Any] = []
        while type(dataset) is Subset and len(self._parts) < _MAX_PARTS:
            self._parts.append(dataset.indices)
            dataset = dataset.dataset
            num_samples = length_of(dataset) or 0
        self._chosen = {number * _STEP % num_samples for number in range(NUM_CHOSEN)} if num_samples else set()
        self._contents: dict[int, int] = {}
        self._has_repeats = False

    def add(self, indices: Any, batch: Any) -> None:
        """Add the samples `indices`, read as the rows of `batch`."""
        if not isinstance(indices, list | tuple) or not indices or type(indices[0]) is not int:
            return
        for part in self._parts:
            indices = [part[number] for number in indices]
        if type(indices[0]) is not int:
            indices = [int(number) for number in indices]
        found = self._chosen.intersection(indices)
        if not found:
            return
        rows = {indices.index(number): number for number in found}
        for row, content in fingerprint_rows(batch, len(indices), list(rows)).items():
            self._has_repeats |= rows[row] in self._contents
            self._contents[rows[row]] = content

    def pairs(self) -> list[tuple[int, int]]:
        """Return index and content of each sample that was read; empty if a sample was read twice."""
        return [] if self._has_repeats else list(self._contents.items())
