# SPDX-License-Identifier: Apache-2.0
"""`LocalBatch`, a rank's piece of a global batch; empty batches, sample digests, and moves to a device."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


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


def without_rows(one: Any, two: Any) -> Any:
    """Make a batch without samples, from a batch of one sample (`one`) and a batch of that sample twice (`two`).

    What is twice as long in `two` contains rows and loses them: dimensions of tensors and arrays, lists, tuples. What
    is equal in both (a number, a shape) stays, as do objects that are neither containers nor dataclasses.
    """
    if isinstance(one, torch.Tensor | np.ndarray):
        if one.ndim != two.ndim:
            return one[:0]
        return one[tuple(slice(None if a == b else 0) for a, b in zip(one.shape, two.shape, strict=True))]
    if isinstance(one, Mapping):
        return _with_items(one, {key: without_rows(value, two[key]) for key, value in one.items()})
    if isinstance(one, tuple) and hasattr(one, "_fields"):
        return type(one)(*(without_rows(a, b) for a, b in zip(one, two, strict=True)))
    if isinstance(one, list | tuple):
        parts = [without_rows(a, b) for a, b in zip(one, two, strict=True)] if len(one) == len(two) else []
        return type(one)(parts)
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one)]
        return _with_attributes(one, {name: without_rows(getattr(one, name), getattr(two, name)) for name in names})
    return one


def _with_items(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the class of `data` (an OrderedDict, a tokenizer's encoding) with these items."""
    if type(data) is dict:
        return items
    result: Any = copy.copy(data)
    for key, value in items.items():
        result[key] = value
    return result


def _with_attributes(data: Any, values: dict[str, Any]) -> Any:
    """Return a copy of the dataclass `data`, which may be frozen, without calling `__init__`."""
    result = copy.copy(data)
    for name, value in values.items():
        object.__setattr__(result, name, value)
    return result


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


def to_device(batch: Any, device: torch.device | str, *, non_blocking: bool = True) -> Any:
    """Return `batch` with all of its tensors on `device`. Not collective.

    Recurses into tuples, named tuples, lists, mappings and dataclasses, which keep their class, and calls `.to(device)`
    of objects that have this method; other objects, and tensors already on `device`, are returned unchanged.
    `non_blocking` (default True): copies from pinned memory are asynchronous; copies from other host memory are not, as
    in torch.
    """
    if isinstance(batch, torch.Tensor):
        if batch.device == device:
            return batch
        # From a device to the host, an asynchronous copy would return the tensor before it has its values.
        return batch.to(device, non_blocking=non_blocking and batch.device.type == "cpu")
    if type(batch) in (list, tuple):
        return type(batch)([to_device(part, device, non_blocking=non_blocking) for part in batch])
    if isinstance(batch, str | bytes | int | float | bool | complex | None):
        return batch
    if callable(getattr(batch, "to", None)):
        return _call_to(batch, device, non_blocking)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(part, device, non_blocking=non_blocking) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(part, device, non_blocking=non_blocking) for part in batch)
    if isinstance(batch, Mapping):
        return _move_mapping(batch, device, non_blocking)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        result = copy.copy(batch)
        for field in dataclasses.fields(batch):
            value = to_device(getattr(batch, field.name), device, non_blocking=non_blocking)
            object.__setattr__(result, field.name, value)  # works for frozen ones and does not call `__init__`
        return result
    return batch


def _call_to(batch: Any, device: torch.device | str, non_blocking: bool) -> Any:
    try:
        return batch.to(device, non_blocking=non_blocking)
    except TypeError:
        return batch.to(device)  # many classes accept only the device


def _move_mapping(batch: Mapping[Any, Any], device: torch.device | str, non_blocking: bool) -> Any:
    moved = {key: to_device(value, device, non_blocking=non_blocking) for key, value in batch.items()}
    if type(batch) is dict:
        return moved
    result: Any = copy.copy(batch)
    for key, value in moved.items():
        result[key] = value
    return result
