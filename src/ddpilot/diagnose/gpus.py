# SPDX-License-Identifier: Apache-2.0
"""The state of NVIDIA devices as NVML reports it: mode, errors, clocks, links and processes. Without torch and CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpilot.environments.nvml import find_devices, open_nvml, read_gpus

_NAME_BYTES = 96
_MAX_LINKS = 18
_UNCORRECTED, _SINCE_BOOT = 1, 0
_READ = 0
MODES = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}
_THROTTLES = {0x8: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}
"""Bits of nvmlClocksThrottleReasons that mean a fault; idle clocks and the power cap are normal."""
_P2P = {0: "ok", 1: "chipset", 2: "GPU", 3: "no IOH support", 4: "disabled", 5: "not supported"}
"""nvmlGpuP2PStatus_t in words: why a device cannot read the other one's memory."""
_NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 25e9, 6: 25e9, 7: 50e9}
"""In one direction, by nvmlNvlinkVersion_t; 6 is NVLink 4 (H100), 7 is NVLink 5 (B200)."""
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
"""In one direction, by generation of PCIe."""


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One device. A value is None if the device or the driver does not report it."""

    uuid: str
    name: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    compute_mode: int | None = None
    is_split: bool = False
    """True in MIG mode."""
    ecc_errors: int | None = None
    """Uncorrected errors since the driver was loaded."""
    throttles: tuple[str, ...] = ()
    """Faults that slow its clocks."""
    processes: Mapping[int, int | None] = field(default_factory=dict)
    """Bytes of device memory by pid."""
    num_nvlinks: int = 0
    link_bytes_per_s: float | None = None
    """Bandwidth of all NVLinks together, or of PCIe, in one direction."""
    peers: tuple[str, ...] = ()
    """For each device in order, "ok" if this one can read its memory, otherwise why not; "" for itself."""


def read_gpu_states(nvml: Any = None) -> tuple[GpuState, ...]:
    """The state of every device; empty without a driver. `nvml`: the library; None loads the system's."""
    uses = read_gpus(nvml)
    with open_nvml(nvml) as library:
        devices = (find_devices(library) or []) if library is not None else []
        handles = [handle for _, handle in devices]
        return tuple(
            _read_state(library, handles, place, uses[place].memory_bytes if place < len(uses) else {})
            for place in range(len(handles))
        )


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _read_state(nvml: Any, handles: list[Any], place: int, processes: Mapping[int, int | None]) -> GpuState:
    device, memory = handles[place], _Memory()
    has_memory = _call(nvml, "nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
    reasons = _number(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", device, kind=ctypes.c_ulonglong) or 0
    split, _ = ctypes.c_uint(0), ctypes.c_uint(0)
    asked = _call(nvml, "nvmlDeviceGetMigMode", device, ctypes.byref(split), ctypes.byref(_))
    ecc = _number(nvml, "nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _SINCE_BOOT, kind=ctypes.c_ulonglong)
    links = [link for link in range(_MAX_LINKS) if _number(nvml, "nvmlDeviceGetNvLinkState", device, link) == 1]
    return GpuState(
        uuid=_text(nvml, "nvmlDeviceGetUUID", device),
        name=_text(nvml, "nvmlDeviceGetName", device),
        total_bytes=int(memory.total) if has_memory else None,
        used_bytes=int(memory.used) if has_memory else None,
        compute_mode=_number(nvml, "nvmlDeviceGetComputeMode", device),
        is_split=asked and split.value == 1,
        ecc_errors=ecc,
        throttles=tuple(text for bit, text in _THROTTLES.items() if reasons & bit),
        processes=processes,
        num_nvlinks=len(links),
        link_bytes_per_s=_read_link(nvml, device, links),
        peers=tuple("" if other is device else _read_peer(nvml, device, other) for other in handles),
    )


def _read_link(nvml: Any, device: Any, links: list[int]) -> float | None:
    if links:
        version = _number(nvml, "nvmlDeviceGetNvLinkVersion", device, links[0])
        speed = _NVLINK_BYTES_PER_S.get(version or 0)
        return None if speed is None else speed * len(links)
    # An idle device lowers its generation, but not its width.
    generation = _number(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", device)
    width, lane = _number(nvml, "nvmlDeviceGetCurrPcieLinkWidth", device), _LANE_BYTES_PER_S.get(generation or 0)
    return None if width is None or lane is None else width * lane


def _read_peer(nvml: Any, device: Any, other: Any) -> str:
    status = _number(nvml, "nvmlDeviceGetP2PStatus", device, other, _READ)
    return "unknown" if status is None else _P2P.get(status, "unknown")


def _call(nvml: Any, name: str, *arguments: Any) -> bool:
    """Call a function of the library; False if it fails or the driver is too old to have it."""
    function = getattr(nvml, name, None)
    return function is not None and function(*arguments) == 0


def _number(nvml: Any, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
    value = kind(0)
    return int(value.value) if _call(nvml, name, *arguments, ctypes.byref(value)) else None


def _text(nvml: Any, name: str, device: Any) -> str:
    text = ctypes.create_string_buffer(_NAME_BYTES)
    is_known = _call(nvml, name, device, text, ctypes.c_uint(_NAME_BYTES))
    return text.value.decode("ascii", "replace") if is_known else "unknown"
