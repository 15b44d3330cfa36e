# SPDX-License-Identifier: Apache-2.0
"""Devices as reported by NVML, with a fake library."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from ddpilot.environments.nvml import GpuUse, NvmlDevices, count_accelerators, find_pci_place, read_gpus, visible_count

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
    """Per device its utilisation and every process's memory; None for values that the driver does not report."""
    nvml = Nvml([(97, {11: 5_000, 12: 2**64 - 1}), (None, {})])
    assert read_gpus(nvml) == (
        GpuUse(percent=97.0, memory_bytes={11: 5_000, 12: None}),
        GpuUse(percent=None, memory_bytes={}),
    )
    assert nvml.num_open == 0


def test_read_gpus_is_empty_when_the_driver_is_too_old() -> None:
    """A library without one of the functions gives no result, and is shut down."""

    class Old(Nvml):
        nvmlDeviceGetComputeRunningProcesses_v3 = property()  # noqa: N815

    old = Old([(97, {})])
    assert read_gpus(old) == ()
    assert old.num_open == 0


def test_find_pci_place_is_empty_for_a_device_that_nvml_does_not_know() -> None:
    """Empty without NVML and for an unknown UUID."""
    assert find_pci_place("00000000-0000-0000-0000-000000000000") == ""
    assert find_pci_place("") == ""


FOUR = NvmlDevices(("GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"))
SPLIT = NvmlDevices(("GPU-aa11", "GPU-aa22"), split=frozenset({0, 1}))
ONE_SPLIT = NvmlDevices(("GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"), split=frozenset({3}))


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("3,1", 2),
        (" 0 , 2 ", 2),
        ("0,1,2,3,4", 4),
        ("0,9,1", 1),
        ("1,-1,2", 1),
        ("0,0", 0),
        ("1gpu2,2ampere", 2),
        ("none", 0),
        ("GPU-bb33", 1),
        ("GPU-b,GPU-c", 2),
        ("GPU-aa", 0),
        ("GPU-bb33,GPU-nope,GPU-cc44", 1),
        ("GPU-bb33,0", 1),
        ("MIG-1234", 0),
    ],
)
def test_visible_count_follows_the_driver(visible: str | None, count: int) -> None:
    """Numbers and identifiers count as the driver counts them: up to the first that names no device, never twice."""
    assert visible_count(visible, FOUR) == count


@pytest.mark.parametrize(("visible", "count"), [(None, 1), ("0,1", 1), ("MIG-GPU-aa11/1/0,MIG-5", 1), ("-1", 0)])
def test_visible_count_is_at_most_one_when_a_device_is_split(visible: str | None, count: int) -> None:
    """A process sees one MIG instance, however many are listed."""
    assert visible_count(visible, SPLIT) == count


@pytest.mark.parametrize(("visible", "count"), [(None, 1), ("0,1,2", 3), ("0,3", 1), ("MIG-5", 1), ("GPU-aa11", 1)])
def test_visible_count_counts_whole_devices_if_those_split_by_mig_are_hidden(visible: str | None, count: int) -> None:
    """One of four devices is split: the three others count where they alone are visible."""
    assert visible_count(visible, ONE_SPLIT) == count


def test_visible_count_is_zero_without_devices() -> None:
    """A driver without devices has none to show."""
    assert visible_count(None, NvmlDevices(())) == 0


def test_count_accelerators_hides_everything_when_the_variable_is_empty() -> None:
    """On any machine, an empty CUDA_VISIBLE_DEVICES leaves nothing."""
    assert count_accelerators({"CUDA_VISIBLE_DEVICES": ""}) == 0
