# SPDX-License-Identifier: Apache-2.0
"""`ensure_on_device`: let a library keep its model on the CPU until it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from ddpilot.errors import DdpilotError

if TYPE_CHECKING:
    import torch

Module = TypeVar("Module", bound="torch.nn.Module")

_moving = threading.RLock()  # two threads that move one module at once can leave it with wrong values


def ensure_on_device(module: Module, device: torch.device | str) -> Module:
    """Move the parameters and buffers of `module` to `device` unless all of them are there; return `module`.

    For a library that makes its model on the CPU and moves it when it is first used, so that importing the library and
    making a model touch no GPU: a process that has a CUDA context cannot be forked, and keeps its memory. Once the
    module is there, a call compares devices and does nothing else (about 0.3 us for each tensor).
    `device`: such as "cuda:1"; one without a number, such as "cuda", is any device of that kind on which the whole
    module is, and otherwise the current one.

    The module is changed in place, as by `module.to(device)`, which is what is called. Between a CPU and a GPU:

    - Parameters stay the same objects, so an optimizer keeps them, but the state that it has for them, such as
      momentum, stays where it was: make optimizers after the move, or let
      `optimizer.load_state_dict(optimizer.state_dict())` bring the state along. Gradients move with their parameters.
    - Tied parameters stay tied. A buffer that two modules share becomes two, as with `module.to`.
    - Inside `torch.inference_mode()` the move is made outside of it, so that the module can be trained later.
    - Several threads may call it for one module.

    Raises DdpilotError, before anything is moved: for what is no module, where a tensor is on the meta device and so
    has no values to move, and for a DistributedDataParallel module on another device, whose buckets would stay behind.
    Not collective.
    """
    import torch

    wanted = torch.device(device)
    if not isinstance(module, torch.nn.Module):
        raise DdpilotError(
            f"moving {type(module).__name__} to {wanted}",
            found=f"`module` is a {type(module).__module__}.{type(module).__qualname__}, not a torch.nn.Module",
            fix="Give the module; a tensor moves by its own `.to(device)`, which returns another one",
        )
    if _is_there(module, wanted):
        return module
    with _moving:
        has_been_moved = _is_there(module, wanted)  # by another thread, meanwhile
        if not has_been_moved:
            _refuse(module, wanted)
            with torch.inference_mode(False):
                module.to(wanted)
    return module


def _is_there(module: torch.nn.Module, wanted: torch.device) -> bool:
    devices = _devices(module)
    first = next(devices, wanted)
    if first.type != wanted.type or wanted.index not in (None, first.index):
        return False
    return all(device == first for device in devices)


def _devices(module: torch.nn.Module) -> Iterator[torch.device]:
    """The device of each parameter and buffer, without the names that `named_parameters` would make."""
    seen = {module}
    todo = [module]
    while todo:
        part = todo.pop()
        for tensors in (part._parameters, part._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    yield tensor.device
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                todo.append(child)


def _refuse(module: torch.nn.Module, wanted: torch.device) -> None:
    from torch.nn.parallel import DistributedDataParallel

    did = f"moving {type(module).__name__} to {wanted}"
    if isinstance(module, DistributedDataParallel):
        raise DdpilotError(
            did,
            found=f"it is a DistributedDataParallel module on {module.device}, where its gradient buckets would stay",
            fix="Move the plain module, then wrap it",
        )
    tensors = [*module.named_parameters(), *module.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta and wanted.type != "meta"]
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise DdpilotError(
            did,
            found=f"`{empty[0]}`{more} on the meta device, with no values to move",
            fix=f'Call `module.to_empty(device="{wanted}")`, then load or initialise its values',
        )
