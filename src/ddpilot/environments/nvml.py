# SPDX-License-Identifier: Apache-2.0
"""Read NVIDIA's management library (NVML): devices, their PCI locations and usage, and which are visible.

No torch and no CUDA context: initializing CUDA in the launching parent (as `torch.cuda.is_available()` does) would make
the GPU unusable in every process forked later.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


def count_accelerators(environ: Mapping[str, str]) -> int:
    """Number of NVIDIA devices visible to a process started with `environ`; 0 without a driver or NVML.

    Interprets CUDA_VISIBLE_DEVICES as the driver does: indices, GPU and MIG identifiers, "" and "-1" (none). If a
    visible device is in MIG mode, the process sees exactly one MIG instance. Not collective, does not import torch,
    does not create a CUDA context.
    """
    devices = read_nvml()
    return 0 if devices is None else visible_count(environ.get("CUDA_VISIBLE_DEVICES"), devices)


def visible_count(visible: str | None, devices: NvmlDevices) -> int:
    """Number of `devices` that `visible`, the value of CUDA_VISIBLE_DEVICES, leaves visible. None: not set."""
    if not devices.uuids:
        return 0
    if visible is None:
        return 1 if devices.split else len(devices.uuids)
    items = [item.strip() for item in visible.split(",")]
    if items[0].startswith("MIG-"):
        return 1 if devices.split else 0
    if items[0].startswith("GPU-"):
        indices = [_index_of_uuid(item, devices.uuids) for item in items]
    else:
        indices = [_leading_int(item) for item in items]
    seen: list[int] = []
    for index in indices:
        # The driver stops at the first invalid entry: all entries after it are ignored too.
        if index is None or not 0 <= index < len(devices.uuids):
            break
        if index in seen:
            return 0
        seen.append(index)
    return 1 if devices.split.intersection(seen) else len(seen)


def _leading_int(text: str) -> int | None:
    match = re.match(r"[+-]?\d+", text)
    return int(match.group()) if match else None


def _index_of_uuid(prefix: str, uuids: tuple[str, ...]) -> int | None:
    found = [index for index, uuid in enumerate(uuids) if uuid.startswith(prefix)]
    return found[0] if len(found) == 1 and prefix.startswith("GPU-") else None


_UUID_BYTES = 96
_VERSION_BYTES = 80
_MAX_PROCESSES = 256
_NOT_AVAILABLE = 2**64 - 1


@dataclass(frozen=True)
class NvmlDevices:
    """Devices that NVML reports: `uuids` in NVML's order ("GPU-..."), `split`: indices of devices in MIG mode."""

    uuids: tuple[str, ...]
    split: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """Usage of one GPU.

    `percent`: share of the time in which a kernel ran; None if the driver does not report it (MIG).
    """

    percent: float | None
    memory_bytes: Mapping[int, int | None]
    """By pid of the compute processes. In a container the driver may report no processes, or pids of the host."""


def read_nvml() -> NvmlDevices | None:
    """The machine's NVIDIA devices according to NVML; None if NVML is missing or fails."""
    with open_nvml() as nvml:
        return None if nvml is None else _read_devices(nvml)


def find_pci_place(uuid: str) -> str:
    """PCI location of the device with `uuid` (the "GPU-" prefix is optional), "00000000:3b:00"; "" if unknown.

    For a MIG instance, the location of its GPU. Does not create a CUDA context.
    """
    with open_nvml() as nvml:
        if nvml is None or not uuid:
            return ""
        for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
            handle, info = ctypes.c_void_p(), _PciInfo()
            if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
                continue
            parent = ctypes.c_void_p()
            if nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle, ctypes.byref(parent)) == 0:
                handle = parent
            if nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(info)) == 0:
                return f"{info.domain:08x}:{info.bus:02x}:{info.device:02x}"
    return ""


def read_gpus(nvml: Any = None) -> tuple[GpuUse, ...]:
    """Return the usage of this machine's GPUs; empty without a driver. `nvml`: the library; None loads the system's."""
    with suppress(AttributeError), open_nvml(nvml) as library:  # a driver may be too old to have these functions
        if library is not None:
            return tuple(_read_use(library, device) for _, device in find_devices(library) or ())
    return ()


def read_driver_version() -> str | None:
    """The NVIDIA driver's version; None without a driver."""
    with open_nvml() as nvml:
        text = ctypes.create_string_buffer(_VERSION_BYTES)
        found = nvml is not None and nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_VERSION_BYTES)) == 0
        return text.value.decode("ascii", "replace") if found else None


class _PciInfo(ctypes.Structure):
    """`nvmlPciInfo_t` of nvml.h."""

    _fields_ = [
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    ]


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@contextmanager
def open_nvml(nvml: Any = None) -> Iterator[Any]:
    """Load and initialize the library, or initialize `nvml`; yields None if there is none or it fails."""
    try:
        nvml = nvml or ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def find_devices(nvml: Any) -> list[tuple[int, ctypes.c_void_p]] | None:
    """The devices that answer, each with its index in NVML's order; None if they cannot be counted."""
    count = ctypes.c_uint(0)
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return None
    handles = [(index, ctypes.c_void_p()) for index in range(count.value)]
    return [(i, device) for i, device in handles if nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(device)) == 0]


def _read_devices(nvml: Any) -> NvmlDevices | None:
    devices = find_devices(nvml)
    if devices is None:
        return None
    uuids: list[str] = []
    split: set[int] = set()
    for index, handle in devices:
        current, pending = ctypes.c_uint(0), ctypes.c_uint(0)
        asked = nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(current), ctypes.byref(pending))
        if asked == 0 and current.value == 1:
            split.add(len(uuids))
        text = ctypes.create_string_buffer(_UUID_BYTES)
        named = nvml.nvmlDeviceGetUUID(handle, text, ctypes.c_uint(_UUID_BYTES)) == 0
        uuids.append(text.value.decode("ascii", "replace") if named else f"unnamed-{index}")
    return NvmlDevices(tuple(uuids), frozenset(split))


def _read_use(nvml: Any, device: ctypes.c_void_p) -> GpuUse:
    rates = _Rates()
    has_rates = nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)) == 0
    count = ctypes.c_uint(_MAX_PROCESSES)
    processes = (_Process * _MAX_PROCESSES)()
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), processes) != 0:
        count.value = 0
    memory = {each.pid: each.memory_bytes for each in processes[: count.value]}
    return GpuUse(
        percent=float(rates.gpu) if has_rates else None,
        memory_bytes={pid: None if size == _NOT_AVAILABLE else int(size) for pid, size in memory.items()},
    )
