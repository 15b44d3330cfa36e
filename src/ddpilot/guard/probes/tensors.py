# SPDX-License-Identifier: Apache-2.0
"""Find the tensors in a batch, and fingerprint them cheaply. Never waits for a device."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

MAX_LEAVES = 8
MAX_ELEMENTS = 1024
"""Larger tensors are sampled at about this many evenly spaced elements."""
MAX_ROW_ELEMENTS = 64


def tensors_in(data: Any, depth: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers, dataclasses and objects with keys such as ``images``, ``0.boxes``."""
    if isinstance(data, torch.Tensor):
        yield "", data
        return
    if depth == 0 or data is None or isinstance(data, str | bytes | int | float | torch.nn.Module):
        return
    items: Any = ()
    if isinstance(data, Mapping):
        items = data.items()
    elif isinstance(data, list | tuple):
        items = enumerate(data[:MAX_LEAVES])
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        items = [(field.name, getattr(data, field.name, None)) for field in dataclasses.fields(data)]
    elif isinstance(getattr(data, "__dict__", None), dict):
        items = list(vars(data).items())
    for number, (key, value) in enumerate(items):
        if number >= 2 * MAX_LEAVES:
            return
        for inner, tensor in tensors_in(value, depth - 1):
            yield f"{key}.{inner}" if inner else str(key), tensor


@dataclasses.dataclass(frozen=True)
class BatchFingerprint:
    """Fingerprint of a batch."""

    checksum: int
    """Equal for equal shapes, types and values; 32 bits."""
    num_elements: int
    """Number of elements of all tensors included."""


def fingerprint(data: Any) -> BatchFingerprint | None:
    """Fingerprint of the first 8 tensors in `data`; None if there are none, or if one is on a device or not dense."""
    value = num_elements = 0
    for number, (_, tensor) in enumerate(tensors_in(data)):
        if number >= MAX_LEAVES:
            break
        if not is_readable(tensor):
            return None
        value = zlib.crc32(f"{tuple(tensor.shape)}{tensor.dtype}".encode(), value)
        value = zlib.crc32(_bytes_of(tensor, MAX_ELEMENTS), value)
        num_elements += tensor.numel()
    return BatchFingerprint(value, num_elements) if num_elements else None


def num_rows_of(data: Any) -> int | None:
    """Size of the first dimension if all tensors in `data` that have one agree, else None."""
    rows = {tensor.shape[0] for _, tensor in tensors_in(data) if tensor.dim()}
    return rows.pop() if len(rows) == 1 else None


def fingerprint_rows(data: Any, num_rows: int, rows: list[int]) -> dict[int, int]:
    """A 32-bit fingerprint of each of `rows` of a batch of `num_rows`; empty if the batch does not consist of rows."""
    leaves = [tensor for _, tensor in tensors_in(data)][:MAX_LEAVES]
    if not leaves or any(not tensor.dim() or tensor.shape[0] != num_rows for tensor in leaves):
        return {}
    if not all(is_readable(tensor) for tensor in leaves):
        return {}
    arrays = [_as_array(tensor) for tensor in leaves]
    found = {}
    for row in rows:
        value = 0
        for array in arrays:
            one = array[row].reshape(-1)
            value = zlib.crc32(one[:: max(1, one.size // MAX_ROW_ELEMENTS)][:MAX_ROW_ELEMENTS].tobytes(), value)
        found[row] = value
    return found


def is_readable(tensor: torch.Tensor) -> bool:
    """True if the values are in host memory, dense and not lazily conjugated, negated or quantized."""
    is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_plain and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _bytes_of(tensor: torch.Tensor, max_elements: int) -> bytes:
    tensor = tensor.detach()
    num = tensor.numel()
    if num > 64 * max_elements and not tensor.is_contiguous():
        # Making all of it contiguous would be expensive.
        tensor = tensor[tuple(slice(0, 8) for _ in range(tensor.dim()))]
        num = tensor.numel()
    flat = tensor.reshape(-1)
    if num > max_elements:
        flat = flat[:: num // max_elements][:max_elements]
    return bytes(_as_array(flat).tobytes())


def _as_array(tensor: torch.Tensor) -> Any:
    """Its values; as integers for dtypes that NumPy lacks."""
    tensor = tensor.detach()
    if tensor.dtype.itemsize == 1 or tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16)
    return tensor.numpy()
