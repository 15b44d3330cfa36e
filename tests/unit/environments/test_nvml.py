# SPDX-License-Identifier: Apache-2.0
"""What NVML says of devices, from a library that answers as NVML does."""

from __future__ import annotations

import ctypes
from typing import Any

from ddpilot.environments.nvml import GpuUse, find_pci_place, read_gpus

NOT_SUPPORTED = 3


class Nvml:
    """NVIDIA's library at its edge: fills what it is given pointers to, and returns 0 or an error number."""

    def __init__(self, devices: list[tuple[int | None, dict[int, int]]]) -> None:
        self.devices = devices
        self.num_open = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802  # NVML's name, as below
        self.num_open += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.num_open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.devices)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:  # noqa: N802
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, rates: Any) -> int:  # noqa: N802
        percent = self.devices[(handle.value or 0) - 1][0]
        if percent is None:
            return NOT_SUPPORTED
        rates._obj.gpu = percent
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: ctypes.c_void_p, count: Any, infos: Any) -> int:  # noqa: N802
        processes = self.devices[(handle.value or 0) - 1][1]
        for info, (pid, num_bytes) in zip(infos, processes.items(), strict=False):
            info.pid, info.memory_bytes = pid, num_bytes
        count._obj.value = len(processes)
        return 0


def test_read_gpus_says_who_uses_what() -> None:
    """Per device its utilisation and every process's memory; what the driver does not tell is None."""
    nvml = Nvml([(97, {11: 5_000, 12: 2**64 - 1}), (None, {})])
    assert read_gpus(nvml) == (
        GpuUse(percent=97.0, memory_bytes={11: 5_000, 12: None}),
        GpuUse(percent=None, memory_bytes={}),
    )
    assert nvml.num_open == 0


def test_read_gpus_is_empty_when_the_driver_is_too_old() -> None:
    """A library without one of the functions tells nothing, and is closed again."""

    class Old(Nvml):
        nvmlDeviceGetComputeRunningProcesses_v3 = property()  # noqa: N815

    old = Old([(97, {})])
    assert read_gpus(old) == ()
    assert old.num_open == 0


def test_find_pci_place_is_empty_for_a_device_that_nvml_does_not_know() -> None:
    """Without NVML, or with a UUID of no device, there is no place."""
    assert find_pci_place("00000000-0000-0000-0000-000000000000") == ""
    assert find_pci_place("") == ""
