# SPDX-License-Identifier: Apache-2.0
"""The module `torch.emu`, as `torch.cuda` is for CUDA."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import amp as amp
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend

_C: Any = sys.modules["emu_C"]

Where = torch.device | str | int | None
FIRST_DEVICE = uuid.UUID("e3e00000-0000-4000-8000-000000000000")


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """What a program may ask of a device."""

    name: str
    uuid: uuid.UUID
    total_memory: int
    """Bytes."""
    major: int = 1
    minor: int = 0
    multi_processor_count: int = 1


def _index(device: Where) -> int:
    if isinstance(device, int):
        return current_device() if device < 0 else device
    where = torch.device("emu" if device is None else device)
    if where.type != "emu":
        raise ValueError(f"Expected an emu device, but got: {where}")
    return _or_current(where.index)


def _or_current(index: int | None) -> int:
    return current_device() if index is None else index


def is_available() -> bool:
    """Say whether there is a device; this initializes nothing."""
    return device_count() > 0


def device_count() -> int:
    """Count the devices that the process sees; this initializes nothing."""
    return int(_C.device_count())


def is_initialized() -> bool:
    """Say whether this process has used a device."""
    return bool(_C.is_initialized()) and not _is_in_bad_fork()


def init() -> None:
    """Initialize the runtime, which no process does that was forked from one that had."""
    _C.initialize()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return bool(_C.is_in_bad_fork())


def has_context(device: Where = None) -> bool:
    """Say whether this process has put memory or work on the device, which on CUDA costs a context."""
    return bool(_C.has_context(_index(device)))


def current_device() -> int:
    """Return the index of the calling thread's device."""
    return int(_C.current_device())


def set_device(device: Where) -> None:
    """Make the device the calling thread's."""
    _C.set_device(_index(device))


class device:  # noqa: N801 # as torch.cuda.device
    """Make the device the calling thread's within a `with`."""

    def __init__(self, device: Where) -> None:
        self.index = _index(device)
        self.before = -1

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *error: object) -> None:
        set_device(self.before)


def get_device_name(device: Where = None) -> str:
    """Return the device's name."""
    return get_device_properties(device).name


def get_device_properties(device: Where = None) -> DeviceProperties:
    """Return the device's name, its UUID, which masking does not change, and its memory."""
    index = _index(device)
    physical = int(_C.physical_device(index))
    return DeviceProperties(
        name="Emulated accelerator",
        uuid=uuid.UUID(int=FIRST_DEVICE.int + physical),
        total_memory=_C.total_memory(index),
    )


def get_device_capability(device: Where = None) -> tuple[int, int]:
    """Return the device's version."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def synchronize(device: Where = None) -> None:
    """Wait for everything that was enqueued on the device's streams."""
    _C.synchronize(_index(device))


def host_syncs() -> dict[str, int]:
    """Count the host's waits for a device since the last reset, by kind.

    The kinds: "synchronize", "stream.synchronize", "event.synchronize", "item", "copy to host", "copy to device", and
    "data-dependent OP" for an operation whose output's shape depends on the values, or that has no Meta kernel.
    """
    return dict(_C.host_syncs())


def reset_host_syncs() -> None:
    """Begin to count from nothing."""
    _C.reset_host_syncs()


def empty_cache() -> None:
    """Give back the memory that no tensor uses."""
    torch.accelerator.empty_cache()


def memory_allocated(device: Where = None) -> int:
    """Return the bytes of the tensors on the device."""
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Where = None) -> int:
    """Return the most bytes that tensors have had at once since the last reset."""
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Where = None) -> int:
    """Return the bytes that the allocator holds."""
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Where = None) -> int:
    """Return the most bytes that the allocator has held since the last reset."""
    return torch.accelerator.max_memory_reserved(_index(device))


def memory_stats(device: Where = None) -> dict[str, Any]:
    """Return the allocator's counters, named as CUDA's."""
    return dict(torch.accelerator.memory_stats(_index(device)))


def reset_peak_memory_stats(device: Where = None) -> None:
    """Begin the peaks from what is used now."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Where = None) -> tuple[int, int]:
    """Return the device's free and total bytes."""
    return torch.accelerator.get_memory_info(_index(device))


def set_memory_limit(size_bytes: int, device: Where = None) -> None:
    """Give the device this much memory; beyond it there is a torch.OutOfMemoryError. 0 restores the first size."""
    _C.set_memory_limit(size_bytes, _index(device))


def set_scribble(on: bool) -> None:
    """Choose whether freed memory is overwritten with 0xFF in the order of its stream (default: yes)."""
    _C.set_scribble(on)


def _generator(device: Where) -> torch.Generator:
    return _C.default_generator(_index(device))  # type: ignore[no-any-return]


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator."""
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seed the current device's generator with a number that differs each time."""
    _generator(None).seed()


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return _generator(None).initial_seed()


def get_rng_state(device: Where = "emu") -> torch.Tensor:
    """Return the state of the device's generator, a byte tensor on the CPU."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Where = "emu") -> None:
    """Restore what `get_rng_state` returned."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of every device's generator."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Restore what `get_rng_state_all` returned."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: Where = None, priority: int = 0, **given: Any) -> Stream:
        if given:
            return super().__new__(cls, priority=priority, **given)
        return super().__new__(cls, torch.device("emu", _index(device)), priority=priority)


class Event(torch.Event):
    """An event of the device."""

    def __new__(cls, enable_timing: bool = False, **given: Any) -> Event:
        return super().__new__(cls, "emu", enable_timing=enable_timing, **given)


def current_stream(device: Where = None) -> torch.Stream:
    """Return the calling thread's stream of the device."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Where = None) -> torch.Stream:
    """Return the stream that a thread begins with."""
    where = torch.device("emu", _index(device))
    return torch.Stream(
        stream_id=0, device_index=where.index, device_type=torch._C._autograd.DeviceType.PrivateUse1.value
    )


def set_stream(stream: torch.Stream) -> None:
    """Make the stream the calling thread's."""
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make the stream the calling thread's within a `with`."""
    if stream is None:
        yield
        return
    with stream:
        yield


def is_current_stream_capturing() -> bool:
    """Say that there are no graphs to capture."""
    return False


def is_bf16_supported() -> bool:
    """Say that bfloat16 works."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return what autocast may cast to."""
    return [torch.float16, torch.bfloat16]


torch._register_device_module("emu", sys.modules[__name__])  # type: ignore[no-untyped-call]
generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True)
