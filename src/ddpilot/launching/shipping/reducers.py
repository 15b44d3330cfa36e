# SPDX-License-Identifier: Apache-2.0
"""Reducers for objects that pickle and cloudpickle cannot handle, or pickle with half a library."""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any


class ModuleGlobals:
    """Placeholder for the globals of the receiver's module `name`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _globals_of, (self._name,)


def _globals_of(name: str) -> dict[str, Any]:
    __import__(name)
    return sys.modules[name].__dict__


def owning_module(function: Any) -> str | None:
    """The importable module whose globals `function` uses although its `__module__` is ``__main__``; None otherwise.

    A decorator's wrapper is such a function: `functools.wraps` copies `__module__` from the wrapped function.
    """
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) and name != "__main__" else None
    is_its = getattr(module, "__spec__", None) is not None and vars(module) is function.__globals__
    return name if is_its else None


def reduce_lazy_module(module: Any) -> Any:
    """Reduce a module with a class of its own, such as ``torch.ops`` and ``torch.ops.aten``, to its name.

    Returns `NotImplemented` for any other object, and if the name does not lead to it.
    """
    if not isinstance(module, types.ModuleType) or type(module) is types.ModuleType:
        return NotImplemented
    return reduce_by_path(module, module.__name__)


def reduce_torch_op(op: Any) -> Any:
    """Reduce a torch operator, such as ``torch.ops.aten.add`` or its overload ``torch.ops.aten.add.Tensor``."""
    name = op.name() if hasattr(op, "name") else op._qualified_op_name
    return reduce_by_path(op, "torch.ops." + name.replace("::", "."))


def reduce_by_path(value: Any, path: str) -> Any:
    """Reduce `value` to its dotted `path`; `NotImplemented` if the path does not lead to it."""
    try:
        is_there = _follow(path) is value
    except (ImportError, AttributeError):
        is_there = False
    return (_follow, (path,)) if is_there else NotImplemented


def _follow(path: str) -> Any:
    top, _, rest = path.partition(".")
    return operator.attrgetter(rest)(importlib.import_module(top)) if rest else importlib.import_module(top)


def is_compiled(value: Any) -> bool:
    """True if `torch.compile` made it; its closure holds Dynamo's state of this process."""
    return hasattr(value, "_torchdynamo_orig_callable")


def reduce_cached(function: Any) -> tuple[Any, ...]:
    """Reduce a `functools.cache` or `lru_cache` of a function pickled by value. The receiver's cache starts empty."""
    parameters = function.cache_parameters()
    return _cache, (function.__wrapped__, parameters["maxsize"], parameters["typed"])


def _cache(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def is_plain_exception(error: object) -> bool:
    """True if `error` uses BaseException's `__reduce__`, which passes `args` to its class whatever `__init__` takes."""
    return isinstance(error, BaseException) and type(error).__reduce__ is BaseException.__reduce__


def reduce_exception(error: BaseException) -> tuple[Any, ...]:
    """Reduce an exception without calling `__init__`, whose parameters may differ from `args`."""
    return _rebuild_exception, (type(error), error.args), dict(vars(error))


def _rebuild_exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    return error


def is_parametrized(module: Any) -> bool:
    """True if `torch.nn.utils.parametrize` changed this instance's class, as spectral and weight norm do."""
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    if parametrize is None or type(module).__module__ != parametrize.__name__:
        return False
    return bool(parametrize.is_parametrized(module))


def reduce_parametrized(module: Any) -> tuple[Any, ...]:
    """Reduce a parametrized torch module, whose class refuses pickling, to its original class and its attributes."""
    original: Any = type(module).__mro__[1]
    has_own = any("__getstate__" in vars(base) for base in original.__mro__[:-1])
    state = original.__getstate__(module) if has_own else dict(vars(module))
    # The attributes are set after the object is created, because they may refer to it.
    return original.__new__, (original,), state, None, None, _set_parametrized


def _set_parametrized(module: Any, state: Any) -> None:
    from torch.nn.utils import parametrize

    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


def is_scheduled(optimizer: Any) -> bool:
    """True if a learning rate scheduler was created for this optimizer: torch then records whether it has stepped."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def reduce_scheduled(optimizer: Any) -> Any:
    """Reduce an optimizer including that record, which torch drops; without it the scheduler would warn wrongly."""
    reduced = optimizer.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or any(each is not None for each in reduced[3:]):
        return reduced  # its class customizes pickling
    build, arguments, state = reduced[:3]
    return build, arguments, (state, hasattr(optimizer, "_opt_called")), None, None, _set_scheduled


def _set_scheduled(optimizer: Any, state: Any) -> None:
    given, has_stepped = state
    optimizer.__setstate__(given)
    step, reference = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def noting(*args: Any, **kwargs: Any) -> Any:
        one: Any = reference()
        one._opt_called = True
        return step(one, *args, **kwargs)

    noting._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # by which a scheduler knows it
    optimizer.step = noting
    if has_stepped:
        optimizer._opt_called = True
