# SPDX-License-Identifier: Apache-2.0
"""What training needs from an accelerator, whichever it is: memory, random states, and results without waiting."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ddpilot.group.protocol import GroupLike

_KNOWN = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "meta")
"""Types of devices between which a parameter moves by exchanging its data."""


def runs_behind(device: torch.device) -> bool:
    """True if calls on `device` return before the work is done, and events show when it is.

    False for the CPU, and for MPS, which has neither events of `torch.Event` nor a random state for each device.
    """
    return device.type not in ("cpu", "mps")


def wire_device(group: GroupLike) -> torch.device:
    """The device for small messages of what Python knows: the CPU if the ranks of `group` can exchange from there.

    A tensor on an accelerator is copied there and back, and the host waits for all that is queued before it.
    """
    return torch.device("cpu") if "gloo" in group.backend else group.device


def device_ids(model: torch.nn.Module, device: torch.device) -> list[int] | None:
    """The `device_ids` of DistributedDataParallel for `model` on a rank of `device`; None if it is on several."""
    is_numbered = device.type != "cpu" and device.index is not None
    return [device.index] if is_numbered and not is_divided(model, device) else None


def is_divided(model: torch.nn.Module, device: torch.device) -> bool:
    """True if `model` has its parameters and buffers on several accelerators of the kind of `device`."""
    places = {tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors}
    return device.type != "cpu" and sum(place.type == device.type for place in places) > 1


def move(model: torch.nn.Module, device: torch.device) -> None:
    """Put `model` on `device`; its parameters stay the same objects, which an optimizer may hold already.

    `Module.to` alone replaces them for a device that torch does not know itself (an out-of-tree accelerator).
    """
    future: Any = torch.__future__
    is_there = all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))
    swaps = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(swaps or (device.type not in _KNOWN and not is_there))
    try:
        model.to(device)
    finally:
        future.set_swap_module_params_on_conversion(swaps)


def fork_rng(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Restore the random states of the CPU and of `devices` at the end of the context."""
    behind = {device for device in devices if runs_behind(device)}
    kinds = {device.type for device in behind}
    if not kinds:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=sorted({device.index for device in behind}), device_type=kinds.pop())


def rng_state(device: torch.device) -> torch.Tensor:
    """The state of the generator of `device`, uint8 on the CPU."""
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the generator of `device` to a `state` of `rng_state`."""
    torch.get_device_module(device).set_rng_state(state, device)


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from here."""
    if device.type != "cpu" and (reset := _memory_function(device, "reset_peak_memory_stats")) is not None:
        reset(device)


def peak_bytes(device: torch.device) -> int:
    """Most memory that tensors had on `device`; 0 on the CPU and where it is not counted."""
    measure = None if device.type == "cpu" else _memory_function(device, "max_memory_allocated")
    return 0 if measure is None else int(measure(device))


def memory_facts(device: torch.device) -> tuple[int, int, int] | None:
    """Bytes of `device` that are free, that it has, and that torch holds in this process; None if that is unknown."""
    if device.type == "cpu":
        return None
    measure = _memory_function(device, "mem_get_info") or _memory_function(device, "get_memory_info")
    hold = _memory_function(device, "memory_reserved")
    if measure is None or hold is None:
        return None
    free, total = measure(device)
    return int(free), int(total), int(hold(device))


def empty_cache(device: torch.device) -> None:
    """Give memory that torch holds and that no tensor uses back to `device`."""
    if device.type != "cpu" and (empty := _memory_function(device, "empty_cache")) is not None:
        empty()


def current_event(device: torch.device, *, enable_timing: bool = False) -> torch.Event:
    """An event in the current stream of `device`, after what is queued there."""
    event = torch.Event(device, enable_timing=enable_timing)
    event.record(torch.accelerator.current_stream(device))
    return event


def _memory_function(device: torch.device, name: str) -> Any:
    # torch.accelerator has them since torch 2.9; the modules of devices often lack some.
    return getattr(torch.get_device_module(device), name, None) or getattr(torch.accelerator, name, None)
