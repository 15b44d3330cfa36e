# SPDX-License-Identifier: Apache-2.0
"""Pickle a value into a parcel, and name what cannot be pickled by its path, such as ``args[0].loader.fn``."""

from __future__ import annotations

import functools
import io
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from ddpilot.errors import ShipError
from ddpilot.launching.shipping.pickling import ShipPickler, is_compiled, owning_module, pack_parcel
from ddpilot.launching.system_limits import explain_limit

_MAX_CHILDREN = 1000
_MAX_DEPTH = 50


def ship(
    name: str, parts: Mapping[str, Any], value: Any, *, did: str, known: list[Any] | None
) -> tuple[int, list[Any]]:
    """Same as `pack_parcel(value)`, but a failure raises a ShipError with the path within `parts` and the object there.

    Raises LaunchError if everything can be pickled but a system limit is reached.
    """
    try:
        return pack_parcel(name, value, known)
    except Exception as error:  # pickling runs the objects' own code, which may raise anything
        path, culprit = find_unpicklable(parts, known)
        limit = explain_limit(did, error) if isinstance(error, OSError) and culprit is parts else None
        if limit is not None:
            raise limit from error
        kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
        raise ShipError(
            did,
            path=path,
            found=f"`{path}` ({kind}) cannot be pickled: {type(error).__name__}: {error}",
            fix=_fix(culprit, is_result="result" in parts, is_call=name != "ddpilot-push"),
        ) from error


def _fix(culprit: Any, *, is_result: bool, is_call: bool) -> str:
    """Advice about `culprit`, which a rank returns (`is_result`) or which is sent to the ranks.

    `is_call`: it is sent as part of a function call.
    """
    if isinstance(culprit, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        verb = "Return" if is_result else "Send"
        return (
            f"{verb} the values that it gives, for instance as a list: a generator or a coroutine stays in its process"
        )
    leave = "Leave it out of what the function returns" if is_result else "Leave it out, or make it on each rank"
    if type(culprit).__module__.startswith(("torch.distributed", "torch._C._distributed")):
        return f"{leave}: what belongs to a process group stays on its rank"
    if is_result:
        return f"{leave}, or return numbers, text or tensors made of it"
    where = ", inside the function" if is_call else ""
    return f"{leave}{where}{': call `torch.compile` there' if is_compiled(culprit) else ''}"


def find_unpicklable(parts: Mapping[str, Any], known: list[Any] | None) -> tuple[str, Any]:
    """Find the innermost object within `parts` that cannot be pickled alone. Returns its path and the object."""
    for path, value in parts.items():
        if not _pickles(value, known):
            return _descend(path, value, known)
    name = " and ".join(parts)
    return name, parts  # each can be pickled alone: they fail only together


def _descend(path: str, value: Any, known: list[Any] | None) -> tuple[str, Any]:
    seen: set[int] = set()
    for _ in range(_MAX_DEPTH):
        seen.add(id(value))
        children = itertools.islice(_children(value), _MAX_CHILDREN)
        broken = next((each for each in children if id(each[1]) not in seen and not _pickles(each[1], known)), None)
        if broken is None:
            break
        path, value = path + broken[0], broken[1]
    return path, value


def _pickles(value: Any, known: list[Any] | None) -> bool:
    try:
        ShipPickler(io.BytesIO(), lambda buffer: None, known).dump(value)
    except Exception:  # any failure means no; the caller chains the first one
        return False
    return True


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if is_compiled(value):
        return
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield f"[{key!r}]", child
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield f"[{index}]", child
    elif isinstance(value, (set, frozenset)):
        for child in value:
            yield f"{{{child!r}}}", child
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _function_children(value)
    if not isinstance(value, types.ModuleType):
        for name, child in _attributes(value):
            yield f".{name}", child


def _function_children(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".closure[{name!r}]", cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
    names = _global_names(function.__code__) if owning_module(function) is None else ()
    for name in names:
        if name in function.__globals__:
            yield f".globals[{name!r}]", function.__globals__[name]
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__


def _global_names(code: types.CodeType) -> set[str]:
    inner = [_global_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    found = dict(getattr(value, "__dict__", None) or {})
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return [(name, child) for name, child in found.items() if not (isinstance(value, type) and name.startswith("__"))]
