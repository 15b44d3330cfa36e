# SPDX-License-Identifier: Apache-2.0
"""Selects attributes that can be copied to a different object: plain values without references to other objects."""

from __future__ import annotations

from collections import deque
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy
import torch

_NUMBERS = (bool, int, float, complex, numpy.generic, numpy.ndarray)
_VALUES = (type(None), *_NUMBERS, str, bytes, PurePath, Enum, torch.dtype)
_CONTAINERS = (list, tuple, set, frozenset, deque)


def is_plain(value: object) -> bool:
    """True if `value` is a number, a string, a path, an array, a tensor without a graph, or a container of those."""
    if isinstance(value, _VALUES):
        return not (isinstance(value, numpy.ndarray) and value.dtype.hasobject)
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.grad_fn is None
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return isinstance(value, _CONTAINERS) and all(map(is_plain, value))


def plain_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of `owner` that are plain; tensors are copied to the CPU."""
    return {name: _on_cpu(value) for name, value in vars(owner).items() if is_plain(value)}


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return value
