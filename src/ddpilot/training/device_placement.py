# SPDX-License-Identifier: Apache-2.0
"""`ensure_on_device`: lets a library keep its model on the CPU until it is first used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from ddpilot.errors import DdpilotError

if TYPE_CHECKING:
    import torch

Module = TypeVar("Module", bound="torch.nn.Module")

_moving = threading.RLock()  # two threads that move one module at the same time can leave it with wrong values


def ensure_on_device(module: Module, device: torch.device | str) -> Module:
    """Move the parameters and buffers of `module` to `device` unless all of them are there; return `module`.

    Not collective. Use it in a library that creates its model on the CPU and moves it on first use. Importing the
    library and creating a model then do not use a GPU: a process with a CUDA context cannot be forked, and the context
    takes memory. If the module is on the device already, a call only compares devices (about 0.3 us per tensor).

    `device`: such as "cuda:1". Without an index, such as "cuda", it is any device of that type that holds the whole
    module, otherwise the current device.

    The module is changed in place by `module.to(device)`. Between a CPU and an accelerator:

    - Parameters remain the same objects, so an optimizer keeps them, and gradients move with their parameters. The
      optimizer's state, such as momentum, is not moved: create optimizers after the move, or call
      `optimizer.load_state_dict(optimizer.state_dict())` to move the state.
    - Tied parameters stay tied. A buffer that two modules share becomes two, as with `module.to`.
    - Inside `torch.inference_mode()` the mode is disabled for the move, so that the module can be trained later.
    - Several threads may call it for one module.

    Raises DdpilotError, before anything is moved, if `module` is not a module, or if a tensor is on the meta device and
    has no values. Raises it also for a DistributedDataParallel module on a different device, whose buckets would not be
    moved.
    """
    import torch

    from ddpilot.group.device import move

    wanted = torch.device(device)
    if not isinstance(module, torch.nn.Module):
        raise DdpilotError(
            f"moving {type(module).__name__} to {wanted}",
            found=f"`module` is a {type(module).__module__}.{type(module).__qualname__}, not a torch.nn.Module",
            fix="Give the module; a tensor moves by its own `.to(device)`, which returns a different tensor",
        )
    if _is_there(module, wanted):
        return module
    with _moving:
        has_been_moved = _is_there(module, wanted)  # by a different thread in the meantime
        if not has_been_moved:
            _check_movable(module, wanted)
            with torch.inference_mode(False):
                move(module, wanted)
    return module


def _is_there(module: torch.nn.Module, wanted: torch.device) -> bool:
    devices = _devices(module)
    first = next(devices, wanted)
    if first.type != wanted.type or wanted.index not in (None, first.index):
        return False
    return all(device == first for device in devices)


def _devices(module: torch.nn.Module) -> Iterator[torch.device]:
    """The device of each parameter and buffer; faster than `named_parameters`, which builds names."""
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


def _check_movable(module: torch.nn.Module, wanted: torch.device) -> None:
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
