# SPDX-License-Identifier: Apache-2.0
"""Nested data (tensors in tuples, lists, mappings, dataclasses): moves to a device, rows, and plain values."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy
import torch

from ddpilot.errors import LoopError


def get_parts(data: Any) -> list[Any] | None:
    """Return the items of a tuple or list, the values of a mapping or the fields of a dataclass; None for the rest."""
    if isinstance(data, list | tuple):
        return list(data)
    if isinstance(data, Mapping):
        return list(data.values())
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return [getattr(data, field.name) for field in dataclasses.fields(data)]
    return None


def replace_parts(data: Any, parts: Sequence[Any]) -> Any:
    """Return an object of the class of `data`, without calling its `__init__`, whose `get_parts` are `parts`."""
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*parts)
    if isinstance(data, list | tuple):
        return type(data)(parts)
    if not isinstance(data, Mapping):
        result = copy.copy(data)
        for field, part in zip(dataclasses.fields(data), parts, strict=True):
            object.__setattr__(result, field.name, part)  # the dataclass may be frozen
        return result
    items = dict(zip(data, parts, strict=True))
    if type(data) is dict:
        return items
    try:
        mapping: Any = copy.copy(data)
        for key, value in items.items():
            mapping[key] = value
    except TypeError:  # an immutable mapping
        return items
    return mapping


def iterate_tensors(data: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in `data`."""
    if isinstance(data, torch.Tensor):
        yield data
    for part in get_parts(data) or ():
        yield from iterate_tensors(part)


def map_tensors(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `data` with `change` applied to every tensor in it.

    Objects that are not containers are returned unchanged, even if they have a `to` method.
    """
    if isinstance(data, torch.Tensor):
        return change(data)
    parts = get_parts(data)
    return data if parts is None else replace_parts(data, [map_tensors(part, change) for part in parts])


def to_host(data: Any) -> Any:
    """Return `data` with its tensors detached, cloned and on the CPU; a view would be sent with its whole storage."""
    return map_tensors(data, lambda tensor: tensor.detach().cpu().clone())


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
    kind = type(batch)
    if kind is tuple or kind is list:
        return kind([to_device(part, device, non_blocking=non_blocking) for part in batch])
    if kind is not dict and callable(getattr(batch, "to", None)):
        try:
            return batch.to(device, non_blocking=non_blocking)
        except TypeError:
            return batch.to(device)  # many classes accept only the device
    parts = get_parts(batch)
    if parts is None:
        return batch
    return replace_parts(batch, [to_device(part, device, non_blocking=non_blocking) for part in parts])


def without_rows(one: Any, two: Any) -> Any:
    """Make a batch without samples, from a batch of one sample (`one`) and a batch of that sample twice (`two`).

    What is twice as long in `two` contains rows and loses them: dimensions of tensors and arrays, lists, tuples. What
    is equal in both (a number, a shape) stays, as do objects that are neither containers nor dataclasses.
    """
    if isinstance(one, torch.Tensor | numpy.ndarray):
        if one.ndim != two.ndim:
            return one[:0]
        return one[tuple(slice(None if a == b else 0) for a, b in zip(one.shape, two.shape, strict=True))]
    parts = get_parts(one)
    if parts is None:
        return one
    others = [two[key] for key in one] if isinstance(one, Mapping) else get_parts(two) or []
    if len(parts) != len(others):  # a list of samples
        return type(one)()
    return replace_parts(one, [without_rows(a, b) for a, b in zip(parts, others, strict=True)])


def check_rows(output: Any, count: int, did: str) -> None:
    """Raise LoopError unless `output` has a row for each of `count` samples, so that rows of ranks can be joined.

    Tensors need `count` rows, tuples and mappings the same in each field, lists one object per sample.
    """
    if isinstance(output, Mapping | tuple):
        for value in get_parts(output) or ():
            check_rows(value, count, did)
    elif not isinstance(output, torch.Tensor | list):
        raise _rows_error(did, f"a {type(output).__name__}, which has no rows")
    elif isinstance(output, torch.Tensor) and (output.ndim == 0 or len(output) != count):
        raise _rows_error(did, f"a tensor of shape {tuple(output.shape)} for {count} samples")
    elif len(output) != count:
        raise _rows_error(did, f"a list of {len(output)} objects for {count} samples")


def _map_rows(outputs: Sequence[Any], of_tensors: Callable[..., Any], of_lists: Callable[..., Any]) -> Any:
    """Apply a function to the tensors, and one to the lists, at the same place of all `outputs`."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return of_tensors(outputs)
    if isinstance(first, Mapping):
        if any(one.keys() != first.keys() for one in outputs):
            raise KeyError("the keys differ")
        return replace_parts(first, [_map_rows([one[key] for one in outputs], of_tensors, of_lists) for key in first])
    if isinstance(first, tuple):
        fields = [_map_rows(column, of_tensors, of_lists) for column in zip(*outputs, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else tuple(fields)
    return of_lists(outputs)


def join_rows(parts: Sequence[Any]) -> Any:
    """Concatenate outputs of the same structure: tensors along their first dimension, lists by their items."""
    return _map_rows(parts, lambda tensors: torch.cat(list(tensors)), lambda lists: [x for some in lists for x in some])


def take_rows(output: Any, rows: Sequence[int]) -> Any:
    """Return the given `rows` of `output`, in that order."""
    index = torch.as_tensor(rows, dtype=torch.long)
    return _map_rows([output], lambda tensors: tensors[0][index], lambda lists: [lists[0][row] for row in rows])


def join_named_rows(parts: Sequence[Any], names: Sequence[str], did: str) -> Any:
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
        ) from cause
    raise LoopError(
        did,
        found=f"what {names[0]} has cannot be joined with what {names[odd]} has: {shapes[0]} and {shapes[odd]}",
        fix="Only the number of rows, the first dimension, may differ: pad what is as wide as a batch, or give a list "
        "with an object for each row.",
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
    own = {name: value for name, value in vars(owner).items() if is_plain(value)}
    return {name: value.detach().cpu() if isinstance(value, torch.Tensor) else value for name, value in own.items()}


def module_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the public plain attributes of `module` that its program set, without `training`."""
    return {name: value for name, value in plain_attributes(module).items() if name[0] != "_" and name != "training"}
