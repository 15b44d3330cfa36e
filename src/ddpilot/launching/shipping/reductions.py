# SPDX-License-Identifier: Apache-2.0
"""How objects travel that pickle and cloudpickle lose, or drag half a library along for."""

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
    """Stands for the globals of the receiver's module `name`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _globals_of, (self._name,)


def _globals_of(name: str) -> dict[str, Any]:
    __import__(name)
    return sys.modules[name].__dict__


def owning_module(function: Any) -> str | None:
    """The importable module whose globals `function` uses, although it is said to be of ``__main__``.

    A decorator's wrapper is such a function: `functools.wraps` names it after what it wraps.
    """
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) and name != "__main__" else None
    is_its = getattr(module, "__spec__", None) is not None and vars(module) is function.__globals__
    return name if is_its else None


def reduce_lazy_module(module: Any) -> Any:
    """A module of a class of its own, such as ``torch.ops`` and ``torch.ops.aten``: by the name that leads to it.

    `NotImplemented` for any other object, and where the name leads elsewhere.
    """
    if not isinstance(module, types.ModuleType) or type(module) is types.ModuleType:
        return NotImplemented
    return reduce_by_path(module, module.__name__)


def reduce_torch_op(op: Any) -> Any:
    """One of torch's operators, such as ``torch.ops.aten.add`` or its overload ``torch.ops.aten.add.Tensor``."""
    name = op.name() if hasattr(op, "name") else op._qualified_op_name
    return reduce_by_path(op, "torch.ops." + name.replace("::", "."))


def reduce_by_path(value: Any, path: str) -> Any:
    """As what `path` leads to; `NotImplemented` where that is not `value`."""
    try:
        is_there = _follow(path) is value
    except (ImportError, AttributeError):
        is_there = False
    return (_follow, (path,)) if is_there else NotImplemented


def _follow(path: str) -> Any:
    top, _, rest = path.partition(".")
    return operator.attrgetter(rest)(importlib.import_module(top)) if rest else importlib.import_module(top)


def is_compiled(value: Any) -> bool:
    """Whether `torch.compile` made it: its closure holds what Dynamo knows of this process."""
    return hasattr(value, "_torchdynamo_orig_callable")


def reduce_cached(function: Any) -> tuple[Any, ...]:
    """A `functools.cache` or `lru_cache` around a function that goes by value: the receiver's cache starts empty."""
    parameters = function.cache_parameters()
    return _cache, (function.__wrapped__, parameters["maxsize"], parameters["typed"])


def _cache(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def is_plain_exception(error: object) -> bool:
    """Whether `error` leaves pickling to BaseException, which calls its class with `args` whatever that takes."""
    return isinstance(error, BaseException) and type(error).__reduce__ is BaseException.__reduce__


def reduce_exception(error: BaseException) -> tuple[Any, ...]:
    """Without calling `__init__`, which may take other arguments than `args`."""
    return _rebuild_exception, (type(error), error.args), dict(vars(error))


def _rebuild_exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    return error


def is_parametrized(module: Any) -> bool:
    """Whether `torch.nn.utils.parametrize` gave this instance a class of its own, as spectral and weight norm do."""
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    if parametrize is None or type(module).__module__ != parametrize.__name__:
        return False
    return bool(parametrize.is_parametrized(module))


def reduce_parametrized(module: Any) -> tuple[Any, ...]:
    """A parametrized torch module, whose class refuses to be pickled: as its original class and its attributes."""
    original: Any = type(module).__mro__[1]
    has_own = any("__getstate__" in vars(base) for base in original.__mro__[:-1])
    state = original.__getstate__(module) if has_own else dict(vars(module))
    # The attributes come after the object, which they may refer to.
    return original.__new__, (original,), state, None, None, _set_parametrized


def _set_parametrized(module: Any, state: Any) -> None:
    from torch.nn.utils import parametrize

    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


def is_scheduled(optimizer: Any) -> bool:
    """Whether a learning rate scheduler was made for this optimizer: torch then notes whether it has stepped."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def reduce_scheduled(optimizer: Any) -> Any:
    """An optimizer with that note, which torch leaves behind: the scheduler would warn of steps that were made."""
    reduced = optimizer.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or any(each is not None for each in reduced[3:]):
        return reduced  # its class has a way of its own to travel
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
