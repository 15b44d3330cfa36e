# SPDX-License-Identifier: Apache-2.0
"""The speed of training, without validations, and the peaks of devices."""

from __future__ import annotations

import pytest
import torch

from ddpilot.training.logs.throughput import Throughput, TrainingClock, find_peak_flops, peak_flops_of


def test_throughput_leaves_out_what_is_paused() -> None:
    """30 samples in 6 of 10 seconds, 3 of them spent waiting for data."""
    now = {"s": 0.0, "samples": 10, "waited": 1.0}
    clock = TrainingClock(lambda: now["s"])
    speed = Throughput(torch.device("cpu"), lambda: int(now["samples"]), lambda: now["waited"], clock)
    assert speed.render() == ""
    with clock.paused():
        now["s"] += 4
    now["s"] += 6
    now["samples"], now["waited"] = 40, 4.0
    assert speed.read() == {"samples_per_s": 5.0, "data_wait": 0.5}
    assert speed.render() == "5 samples/s, data 50%"
    speed.begin()
    assert speed.seconds == 0


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla T4", 65),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10G", None),
        ("Some A1000", None),
        ("", None),
    ],
)
def test_peak_flops_are_those_of_the_data_sheet(name: str, tflops: float | None) -> None:
    """A device whose name only begins like a known one is unknown."""
    assert peak_flops_of(name) == (None if tflops is None else tflops * 1e12)


def test_find_peak_flops_is_unknown_on_the_cpu() -> None:
    """So there is no "mfu"."""
    assert find_peak_flops(torch.device("cpu")) is None
