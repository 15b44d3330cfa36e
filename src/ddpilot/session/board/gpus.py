# SPDX-License-Identifier: Apache-2.0
"""Read GPU utilization and memory from NVIDIA's management library (NVML), without torch or a CUDA context."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAX_PROCESSES = 256
_NOT_AVAILABLE = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """Usage of one GPU.

    `percent`: share of the time in which a kernel ran; None if the driver does not report it (MIG).
    """

    percent: float | None
    memory_bytes: Mapping[int, int | None]
    """By pid of the compute processes. In a container the driver may report no processes, or pids of the host."""


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def read_gpus(nvml: Any = None) -> tuple[GpuUse, ...]:
    """Return the usage of this machine's GPUs; empty without a driver. `nvml`: the library; None loads the system's."""
    with contextlib.suppress(OSError, AttributeError):  # no driver, or one that is too old to have these functions
        library = nvml or ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            try:
                return _read_all(library)
            finally:
                library.nvmlShutdown()
    return ()


def _read_all(nvml: Any) -> tuple[GpuUse, ...]:
    count = ctypes.c_uint(0)
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return ()
    found = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
            found.append(_read_one(nvml, device))
    return tuple(found)


def _read_one(nvml: Any, device: ctypes.c_void_p) -> GpuUse:
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
