# SPDX-License-Identifier: Apache-2.0
"""Counting NVIDIA devices from what NVML and CUDA_VISIBLE_DEVICES say."""

from __future__ import annotations

import pytest

from ddpilot.environments.devices_count import count_accelerators, visible_count
from ddpilot.environments.nvml import NvmlDevices

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
