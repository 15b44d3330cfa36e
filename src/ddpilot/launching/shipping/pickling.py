# SPDX-License-Identifier: Apache-2.0
"""Pickle objects into memory files and back; torch is imported only if there are tensors.

Definitions in ``__main__`` (a script or a notebook's cells) are pickled by value. Tensor storages and NumPy buffers are
stored next to the pickle, each once. A parcel ends with a footer, so that it can be opened from its file alone.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import io
import pickle
import pkgutil
import struct
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import cloudpickle
from cloudpickle.cloudpickle import _function_setstate

from ddpilot.errors import LaunchError
from ddpilot.launching.shipping.memory_file import MemoryWriter, Span

_FOOTER = struct.Struct("<QQ")


def _main_globals() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


def set_function_state(function: Any, state: Any) -> None:
    """Restore a function from ``__main__``; the names it refers to become globals of the receiver's ``__main__``."""
    _function_setstate(function, state)


def _set_state_apart(uses: dict[str, Any], function: Any, state: Any) -> None:
    """Like `set_function_state`, but the names that the function refers to are stored in `uses` instead."""
    _, slots = state
    uses.update(slots["__globals__"])
    slots["__globals__"] = {}
    _function_setstate(function, state)


def known_object(index: int) -> Any:
    """Placeholder in a pickle for object number `index` of those that the receiver itself has shipped."""
    raise pickle.UnpicklingError(f"object {index} of a parcel was asked for outside `open_parcel`")


class ShipPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Pickles definitions of ``__main__`` by value, storages out of band, and a DDP model as the module it wraps, since
    its process group belongs to its rank.

    `defined` collects the classes and functions pickled by value, `storages` the storages of tensors. `known` is None
    when pickling for a rank, where functions from ``__main__`` share the globals of the rank's ``__main__``. When
    pickling a rank's result it is the list of objects that the receiver shipped: these are pickled as indices, so that
    an instance has the receiver's own class, and no function changes the receiver's globals.
    """

    def __init__(self, stream: io.BytesIO, keep_buffer: Any, known: Sequence[Any] | None = None) -> None:
        super().__init__(stream, protocol=5, buffer_callback=keep_buffer)
        self.defined: dict[int, Any] = {}
        self._known = {id(value): index for index, value in enumerate(known or ())}
        self.storages: dict[int, Any] = {}
        self._goes_to_rank = known is None
        if self._goes_to_rank:
            # Functions from ``__main__`` share the globals of the receiver's.
            self.globals_ref[id(_main_globals())] = ModuleGlobals("__main__")

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self._known:
            return known_object, (self._known[id(obj)],)
        torch = loaded_torch()
        if torch is not None:
            if isinstance(obj, (torch.UntypedStorage, torch.storage.TypedStorage)):
                return self._reduce_storage(obj)
            if isinstance(obj, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
                return reduce_torch_op(obj)
            if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
                return _module_in_ddp, (obj.module,)
            if is_parametrized(obj):
                return reduce_parametrized(obj)
            if isinstance(obj, torch.optim.Optimizer) and is_scheduled(obj):
                return reduce_scheduled(obj)
        if isinstance(obj, types.CodeType):
            return _code_of_file, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))
        by_name = reduce_lazy_module(obj)
        if by_name is not NotImplemented:
            return by_name
        if isinstance(obj, types.FunctionType) and is_compiled(obj):
            raise pickle.PicklingError("what torch.compile made of a function belongs to its process")
        if is_plain_exception(obj):
            return reduce_exception(obj)
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
            self.defined[id(obj)] = obj
            return reduce_cached(obj)
        if type(obj) is weakref.WeakKeyDictionary:  # the cache of each `functools.singledispatch` function
            return weakref.WeakKeyDictionary, (dict(obj),)
        reduced = super().reducer_override(obj)
        is_definition = isinstance(obj, (type, types.FunctionType)) and obj.__module__ != "builtins"
        if is_definition and reduced is not NotImplemented:  # cloudpickle pickles it by value
            self.defined[id(obj)] = obj
        return reduced

    def _dynamic_function_reduce(self, func: Any) -> Any:
        owner = owning_module(func)
        if owner is not None:
            self.globals_ref[id(func.__globals__)] = ModuleGlobals(owner)
        reduced = super()._dynamic_function_reduce(func)
        if owner is not None:
            _, slots = reduced[2]
            slots["__globals__"] = {}  # the receiver's module provides them
        elif self._goes_to_rank and func.__globals__ is _main_globals():
            reduced = (*reduced[:5], set_function_state)
        return reduced

    def _reduce_storage(self, storage: Any) -> Any:
        if isinstance(storage, sys.modules["torch"].storage.TypedStorage):
            untyped = storage._untyped_storage
            return _typed_storage, (self.storages.setdefault(untyped._cdata, untyped), storage.dtype)
        if storage.device.type == "meta":
            return NotImplemented
        on_host = storage if storage.device.type == "cpu" else storage.cpu()
        self.storages.setdefault(storage._cdata, storage)
        if on_host.nbytes() == 0:
            return _untyped_storage, (b"",)
        region = (ctypes.c_ubyte * on_host.nbytes()).from_address(on_host.data_ptr())
        region.storage = on_host  # keeps the storage alive as long as the view
        return _untyped_storage, (pickle.PickleBuffer(region),)


def loaded_torch() -> Any:
    """The torch module if this process has imported it, else None; waits for a thread that is importing it."""
    torch = sys.modules.get("torch")
    if getattr(getattr(torch, "__spec__", None), "_initializing", False):
        torch = importlib.import_module("torch")  # waits for that thread
    return torch


def _code_of_file(filename: str, build: Callable[..., types.CodeType], args: tuple[Any, ...]) -> types.CodeType:
    """Rebuild a code object with its file name, which tracebacks and findings need and cloudpickle 3.1.3 drops."""
    return build(*args).replace(co_filename=filename)


def _module_in_ddp(module: Any) -> Any:
    return module


def _untyped_storage(data: Any) -> Any:
    import torch

    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage() if len(data) else torch.UntypedStorage(0)  # type: ignore[no-untyped-call]


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def pack_parcel(name: str, value: Any, known: Sequence[Any] | None = None) -> tuple[int, list[Any]]:
    """Pickle `value` into a new memory file. Returns its descriptor and the definitions that were pickled by value.

    The parcel also contains those definitions. `known`: as for `ShipPickler`. Raises whatever pickling raises, after
    closing the file.
    """
    file = MemoryWriter(name)
    try:
        spans: list[Span] = []
        stream = io.BytesIO()
        pickler = ShipPickler(stream, lambda buffer: spans.append(file.write(buffer.raw())), known)
        pickler.dump(value)
        defined = _current_last(pickler.defined.values())
        pickler.dump(defined)
        body = file.write(stream.getbuffer())
        index = file.write(pickle.dumps((body, spans)))
        file.write(_FOOTER.pack(index.offset, index.length))
        return file.seal(), defined
    finally:
        file.close()


def _current_last(definitions: Iterable[Any]) -> list[Any]:
    """Sort so that, of two classes with one name (a cell was run twice), ``__main__``'s current one is bound last."""
    now = _main_globals()
    return sorted(definitions, key=lambda definition: now.get(definition.__qualname__) is definition)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, stream: io.BytesIO, buffers: list[memoryview], known: Sequence[Any], uses: dict[str, Any] | None
    ) -> None:
        super().__init__(stream, buffers=buffers)
        self._known = known
        self._uses = uses

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == __name__ and global_name == known_object.__name__:
            return self._known.__getitem__
        if module_name == __name__ and global_name == set_function_state.__name__ and self._uses is not None:
            return functools.partial(_set_state_apart, self._uses)
        return super().find_class(module_name, global_name)


def importable_from_main(definitions: Iterable[Any]) -> dict[str, Any]:
    """The `definitions` that pickles look up in ``__main__``, by name."""
    of_main = (each for each in definitions if each.__module__ == "__main__")
    return {each.__qualname__: each for each in of_main if "." not in each.__qualname__}


def open_parcel(
    mapped: memoryview, known: Sequence[Any] = (), uses: dict[str, Any] | None = None
) -> tuple[Any, list[Any]]:
    """Unpickle a parcel's value and the definitions that came with it; large data stays in the mapping.

    Functions from ``__main__`` share the globals of this process's ``__main__``: the names they refer to are set there
    and replace existing ones. With `uses`, they are stored in `uses` by name instead, and ``__main__`` is not changed.
    Raises whatever unpickling raises, such as ModuleNotFoundError.
    """
    loaded_torch()  # unpickling may import parts of torch while a different thread is still importing it
    offset, length = _FOOTER.unpack(mapped[-_FOOTER.size :])
    body, spans = pickle.loads(mapped[offset : offset + length])
    stream, *buffers = (mapped[span.offset : span.offset + span.length] for span in (body, *spans))
    unpickler = _Unpickler(io.BytesIO(stream), buffers, known, uses)
    return unpickler.load(), unpickler.load()


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
        is_there = pkgutil.resolve_name(path) is value
    except (ImportError, AttributeError, ValueError):
        is_there = False
    return (pkgutil.resolve_name, (path,)) if is_there else NotImplemented


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


class RankResults(Sequence[Any]):
    """Every rank's value, by rank: `results[0]` is what rank 0 returned.

    A value is unpickled on first access. Large tensors in it are backed by a memory file, which is read when they are
    used; they belong to this process. A DDP model comes back as the module that it wraps. Classes and functions that
    the parent sent come back as the parent's own objects.
    """

    def __init__(self, parcels: Sequence[memoryview], known: Sequence[Any]) -> None:
        self._parcels: list[Any] = list(parcels)
        self._known = known
        self._values: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._parcels)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[rank] for rank in range(*index.indices(len(self)))]
        rank = range(len(self))[index]
        if rank not in self._values:
            self._values[rank] = self._open(rank)
        return self._values[rank]

    def __repr__(self) -> str:
        return f"RankResults({list(self)!r})"

    def _open(self, rank: int) -> Any:
        try:
            value, _ = open_parcel(self._parcels[rank], self._known)
        except Exception as error:  # unpickling runs the value's own code, which may raise anything
            raise LaunchError(
                f"reading what rank {rank} returned",
                found=f"{type(error).__name__}: {error}",
                fix="Return plain values, tensors, a model or its `state_dict()`, or objects "
                "whose modules this process can import",
                rank=rank,
            ) from error
        self._parcels[rank] = None  # frees what the value does not use
        return value
