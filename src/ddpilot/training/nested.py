# SPDX-License-Identifier: Apache-2.0
"""Nested data (tensors in tuples, lists, dicts, dataclasses): maps and joins rows, and selects plain values."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy
import torch

from ddpilot.errors import LoopError


def map_tensors(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `data` with `change` applied to every tensor in its tuples, lists, mappings and dataclasses.

    Objects of other types are returned unchanged, even if they have a `to` method.
    """
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        changed = {key: map_tensors(value, change) for key, value in data.items()}
        return changed if type(data) is dict else _rebuild_mapping(data, changed)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, change) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_tensors(value, change) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {f.name: map_tensors(getattr(data, f.name), change) for f in dataclasses.fields(data) if f.init}
        return dataclasses.replace(data, **fields)
    return data


def to_host(data: Any) -> Any:
    """Return `data` with its tensors detached, cloned and on the CPU; a view would be sent with its whole storage."""
    return map_tensors(data, lambda tensor: tensor.detach().cpu().clone())


def check_rows(output: Any, count: int, did: str) -> None:
    """Raise LoopError unless `output` has a row for each of `count` samples, so that rows of ranks can be joined.

    Tensors need `count` rows, tuples and mappings the same in each field, lists one object per sample.
    """
    if isinstance(output, Mapping):
        for value in output.values():
            check_rows(value, count, did)
    elif isinstance(output, tuple):
        for value in output:
            check_rows(value, count, did)
    elif not isinstance(output, torch.Tensor | list):
        raise _rows_error(did, f"a {type(output).__name__}, which has no rows")
    elif isinstance(output, torch.Tensor) and (output.ndim == 0 or len(output) != count):
        raise _rows_error(did, f"a tensor of shape {tuple(output.shape)} for {count} samples")
    elif len(output) != count:
        raise _rows_error(did, f"a list of {len(output)} objects for {count} samples")


def join_rows(parts: Sequence[Any]) -> Any:
    """Concatenate outputs of the same structure: tensors along their first dimension, lists by their items."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        joined = {key: join_rows([part[key] for part in parts]) for key in first}
        return joined if type(first) is dict else _rebuild_mapping(first, joined)
    if isinstance(first, tuple):
        fields = [join_rows(column) for column in zip(*parts, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else tuple(fields)
    return [item for part in parts for item in part]


def join_named_rows(parts: Sequence[Any], names: Sequence[str], did: str, rank: int) -> Any:
    """Call `join_rows`; if a part does not match the first one, raise LoopError with the shapes and `names` of both."""
    cause = None
    if len({_kind(part) for part in parts}) == 1:
        try:
            return join_rows(parts)
        except (RuntimeError, TypeError, LookupError, ValueError, AttributeError) as error:
            cause = error
    shapes = [describe_rows(part) for part in parts]
    odd = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is None:
        raise LoopError(
            did,
            found=f"{shapes[0]} from each, which has no rows to be joined",
            fix="Give tensors with rows (of one value: reshape(1)), tuples or dicts of them, or lists of objects; "
            "loop.reduce() takes a number.",
            rank=rank,
        ) from cause
    raise LoopError(
        did,
        found=f"what {names[0]} has cannot be joined with what {names[odd]} has: {shapes[0]} and {shapes[odd]}",
        fix="Only the number of rows, the first dimension, may differ: pad what is as wide as a batch, or give a list "
        "with an object for each row.",
        rank=rank,
    ) from cause


def _kind(part: Any) -> type:
    return next((kind for kind in (torch.Tensor, Mapping, tuple) if isinstance(part, kind)), list)


def describe_rows(output: Any) -> str:
    """Describe the structure, dtypes and all dimensions but the first, such as "(*, 3) of float32"."""
    if isinstance(output, torch.Tensor):
        sizes = ", ".join(map(str, ["*", *output.shape[1:]])) if output.ndim else ""
        return f"({sizes}) of {str(output.dtype).removeprefix('torch.')}"
    if isinstance(output, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe_rows(value)}" for key, value in output.items()) + "}"
    if isinstance(output, tuple):
        return "(" + ", ".join(map(describe_rows, output)) + ")"
    return f"a {type(output).__name__}"


def take_rows(output: Any, rows: Sequence[int]) -> Any:
    """Return the given `rows` of `output`, in that order."""
    if isinstance(output, torch.Tensor):
        return output[torch.as_tensor(rows, dtype=torch.long)]
    if isinstance(output, Mapping):
        taken = {key: take_rows(value, rows) for key, value in output.items()}
        return taken if type(output) is dict else _rebuild_mapping(output, taken)
    if isinstance(output, tuple):
        fields = [take_rows(value, rows) for value in output]
        return type(output)(*fields) if hasattr(output, "_fields") else tuple(fields)
    return [output[row] for row in rows]


def _rebuild_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(data)(items)  # type: ignore[call-arg]
    except TypeError:  # a class whose constructor takes other arguments: return a dict
        return items


def _rows_error(did: str, found: str) -> LoopError:
    return LoopError(
        did,
        found=f"the model returned {found}",
        fix="Return tensors with one row per sample, tuples or dicts of them, or a list with one object per sample; "
        "pass `forward=` to choose what of the output is kept.",
    )


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
