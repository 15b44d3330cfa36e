# SPDX-License-Identifier: Apache-2.0
"""Attributes that can be set on another object as they are: they refer to nothing but themselves."""

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
    """Whether `value` is a number, a text, a path, an array, a tensor without a graph, or a container of those."""
    if isinstance(value, _VALUES):
        return not (isinstance(value, numpy.ndarray) and value.dtype.hasobject)
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.grad_fn is None
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return isinstance(value, _CONTAINERS) and all(map(is_plain, value))


def plain_attributes(owner: Any) -> dict[str, Any]:
    """Those of `owner`'s own attributes that are plain; tensors on the CPU."""
    return {name: _on_cpu(value) for name, value in vars(owner).items() if is_plain(value)}


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return value
