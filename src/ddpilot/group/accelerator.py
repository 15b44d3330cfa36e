# SPDX-License-Identifier: Apache-2.0
"""Device helpers that work on every accelerator type: placement, memory statistics, random states and events."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ddpilot.group.protocol import GroupLike

_KNOWN = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "meta")
"""Device types for which `Module.to` moves a parameter by swapping its `.data`."""


def runs_behind(device: torch.device) -> bool:
    """True if calls on `device` return before the work is done, and events show when it is.

    False for the CPU, and for MPS, which has neither events of `torch.Event` nor a random state for each device.
    """
    return device.type not in ("cpu", "mps")


def wire_device(group: GroupLike) -> torch.device:
    """Return the device for small host-side messages: the CPU if `group` has a gloo backend, else the group's device.

    A tensor on an accelerator is copied there and back, and the host waits for all work queued before it.
    """
    return torch.device("cpu") if "gloo" in group.backend else group.device


def device_ids(model: torch.nn.Module, device: torch.device) -> list[int] | None:
    """Return the `device_ids` argument of DistributedDataParallel for a rank on `device`.

    None on the CPU, for a device without an index, and for a model that is divided over several devices.
    """
    is_numbered = device.type != "cpu" and device.index is not None
    return [device.index] if is_numbered and not is_divided(model, device) else None


def is_divided(model: torch.nn.Module, device: torch.device) -> bool:
    """True if the parameters and buffers of `model` are on more than one accelerator of the type of `device`."""
    places = {tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors}
    return device.type != "cpu" and sum(place.type == device.type for place in places) > 1


def move(model: torch.nn.Module, device: torch.device) -> None:
    """Move `model` to `device` in place; its parameters remain the same objects, which an optimizer may already hold.

    `Module.to` alone replaces them on device types that torch does not know itself (out-of-tree accelerators).
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
    """Return the state of the generator of `device`, as a uint8 tensor on the CPU."""
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of the generator of `device` to `state`, as returned by `rng_state`."""
    torch.get_device_module(device).set_rng_state(state, device)


def reset_peak(device: torch.device) -> None:
    """Reset the peak that `peak_bytes` returns. Does nothing on the CPU."""
    if device.type != "cpu" and (reset := _memory_function(device, "reset_peak_memory_stats")) is not None:
        reset(device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors on `device`, in bytes; 0 on the CPU and on devices that do not measure it."""
    measure = None if device.type == "cpu" else _memory_function(device, "max_memory_allocated")
    return 0 if measure is None else int(measure(device))


def memory_facts(device: torch.device) -> tuple[int, int, int] | None:
    """Return the free, total and torch-reserved bytes of `device`; None if they are unknown.

    The reserved bytes are those of this process.
    """
    if device.type == "cpu":
        return None
    measure = _memory_function(device, "mem_get_info") or _memory_function(device, "get_memory_info")
    hold = _memory_function(device, "memory_reserved")
    if measure is None or hold is None:
        return None
    free, total = measure(device)
    return int(free), int(total), int(hold(device))


def empty_cache(device: torch.device) -> None:
    """Release cached memory that no tensor uses to `device`. Does nothing on the CPU."""
    if device.type != "cpu" and (empty := _memory_function(device, "empty_cache")) is not None:
        empty()


def current_event(device: torch.device, *, enable_timing: bool = False) -> torch.Event:
    """Record an event in the current stream of `device`, after the work that is queued there."""
    event = torch.Event(device, enable_timing=enable_timing)
    event.record(torch.accelerator.current_stream(device))
    return event


def _memory_function(device: torch.device, name: str) -> Any:
    # torch.accelerator has these functions since torch 2.9; the modules of some devices lack them.
    return getattr(torch.get_device_module(device), name, None) or getattr(torch.accelerator, name, None)
