# SPDX-License-Identifier: Apache-2.0
"""Move the tensors of a nested batch to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


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
