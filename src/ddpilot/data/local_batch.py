# SPDX-License-Identifier: Apache-2.0
"""`LocalBatch`, a rank's piece of a global batch; digests of samples, and their random state in any worker."""

from __future__ import annotations

import dataclasses
import random
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info


@dataclasses.dataclass(eq=False, slots=True)  # creating a frozen one would take four times as long
class LocalBatch:
    """This rank's piece of one global batch."""

    data: Any
    """The piece, collated. If `count` is 0: the same structure, dtypes and shapes, with zero rows."""

    index: int
    """Number of the global batch in its epoch, from 0."""

    count: int
    """Number of samples on this rank; 0 if a last batch has fewer samples than there are ranks."""

    global_count: int | None
    """Number of samples on all ranks. None if the loader `is_joint`: the ranks have to add up their counts."""

    sample_ids: NDArray[np.int64]
    """Indices of the samples in the dataset, shape (`count`,), in the order of `data`; -1 if an iterable dataset
    divides itself, as its samples are not numbered."""

    stream_state: Any = None
    """For an iterable dataset with `state_dict`: its state after this batch, equal on every rank. None otherwise, and
    after a last batch that is smaller."""

    first_seen: SampleDigest | None = None
    """For a stream that every rank reads as a whole: the digest of the first sample of the global batch, to compare
    between ranks. None otherwise, and without `seed_samples`, when samples may differ."""


def render_loader(loader: Any) -> str:
    """Return the `repr` of a loader of this package: its class, its dataset and its batches. Reads no sample."""
    try:
        num = f"{len(loader):,}"
    except TypeError:  # the length of a stream is unknown
        num = "unknown number of"
    batches = f"{num} batches of {loader.plan.global_batch_size:,} samples"
    return f"{type(loader).__name__}({type(loader.dataset).__name__}, {batches}, this is rank {loader.rank})"


BatchObserver = Callable[[LocalBatch, int, int], object]
observers: list[BatchObserver] = []
"""Called with each batch that a loop of this process reads, and when reading it began and ended, in ns on
CLOCK_MONOTONIC."""


def observe(batches: Iterator[LocalBatch]) -> Iterator[LocalBatch]:
    """Yield from `batches`, and call the `observers` that there are at each."""
    try:
        while True:
            begin_ns = time.monotonic_ns()
            batch = next(batches, None)
            if batch is None:
                return
            end_ns = time.monotonic_ns() if observers else 0
            for observer in observers:
                observer(batch, begin_ns, end_ns)
            yield batch
    finally:
        if isinstance(batches, Generator):
            batches.close()


_MAX_PARTS = 64
_MAX_VALUES = 1024
"""Maximum number of values of a large array that are read, evenly spaced: a few microseconds for an image."""
_MAX_CHARACTERS = 60


class SampleDigest(NamedTuple):
    """A sample as this process read it."""

    number: int
    """Checksum of the content, 0 to 2**32 - 1; equal for equal samples."""

    text: str
    """Beginning of the content, at most 60 characters."""


NOTHING = SampleDigest(0, "nothing")


def digest_sample(sample: Any) -> SampleDigest:
    """Return the digest of `sample`.

    Covers numbers, strings, bytes, tensors, arrays and PIL images, also in tuples, lists, mappings and dataclasses; of
    other objects, only the class.
    """
    number = 0
    words = []
    for index, part in zip(range(_MAX_PARTS), _parts(sample), strict=False):
        content, text = _read_part(part)
        number = zlib.crc32(content, number)
        if index < 3:
            words.append(text)
    whole = ", ".join(words)
    return SampleDigest(number, whole if len(whole) <= _MAX_CHARACTERS else f"{whole[: _MAX_CHARACTERS - 3]}...")


def _parts(sample: Any) -> Iterator[Any]:
    if isinstance(sample, Mapping):
        for key, value in sample.items():
            yield str(key)
            yield from _parts(value)
    elif isinstance(sample, list | tuple):
        for value in sample:
            yield from _parts(value)
    elif dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        for field in dataclasses.fields(sample):
            yield from _parts(getattr(sample, field.name))
    else:
        yield sample


def _read_part(part: Any) -> tuple[bytes, str]:
    if isinstance(part, str | bytes):
        text = repr(part[:4096])
        return text.encode(errors="replace"), text
    if isinstance(part, int | float | complex | np.generic | None):
        text = repr(part.item() if isinstance(part, np.generic) else part)
        return text.encode(), text
    if isinstance(part, torch.Tensor) and _has_values(part):
        flat = part.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _MAX_VALUES)]
        content = some.contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return content + str(tuple(part.shape)).encode(), _few(flat[:3].tolist(), flat.numel())
    if hasattr(part, "__array_interface__"):
        array = np.asarray(part)
        if array.dtype != object:
            flat_array = array.reshape(-1)
            content = flat_array[:: max(1, flat_array.size // _MAX_VALUES)].tobytes()
            return content + str(array.shape).encode(), _few(flat_array[:3].tolist(), array.size)
    name = type(part).__name__
    return name.encode(), f"a {name}"


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized


def _few(values: list[Any], num: int) -> str:
    if num == 1:
        return str(values[0])
    return f"[{', '.join(f'{value:.4g}' if isinstance(value, float) else str(value) for value in values)}" + (
        ", ...]" if num > len(values) else "]"
    )


_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """Hash `parts` to a 64-bit number; different parts, or a different order of them, give an unrelated number."""
    state = 0
    for part in parts:
        # The finalizer of splitmix64: every input bit changes about half of the output bits.
        state = (state + 0x9E3779B97F4A7C15 + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_random(seed: int) -> None:
    """Seed Python's `random`, NumPy's global state (with the lower half) and torch's CPU generator with 64 bits."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # several times faster than seeding with an array of both halves
    torch.default_generator.manual_seed(seed)


@contextmanager
def random_kept() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's CPU random state on exit, so that the model's draws are not affected."""
    before_python = random.getstate()
    before_numpy = np.random.get_state(legacy=False)
    before_torch = torch.default_generator.get_state()
    try:
        yield
    finally:  # also for Ctrl-C, after which the loop may continue
        random.setstate(before_python)
        np.random.set_state(before_numpy)
        torch.default_generator.set_state(before_torch)


def random_apart() -> AbstractContextManager[None]:
    """Return a context manager for reading samples with seeds, which preserves the random state of the rank.

    It does nothing in a worker, whose random state nothing else uses.
    """
    return random_kept() if get_worker_info() is None else nullcontext()
