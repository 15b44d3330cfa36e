# SPDX-License-Identifier: Apache-2.0
"""`Throughput`: samples per second, the share of time spent waiting for data, and memory; peaks of devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ddpilot.group.device import peak_bytes

_PEAK_TFLOPS = {
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 PCIE": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A30": 165,
    "A10": 125,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
}
"""Peaks in TFLOP/s, dense and in 16 bits, by a part of the device's name."""


class TrainingClock:
    """Seconds since any fixed time, without the time in `paused`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._paused_s = 0.0

    def __call__(self) -> float:
        """Return the seconds."""
        return self._clock() - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block, such as a validation, out of the time."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - began_s


class Throughput:
    """Measures the speed of training since `begin`, in seconds of `clock`.

    `num_samples`: returns the number of samples of all ranks so far. `waited_s`: returns the seconds that this rank has
    waited for data so far.
    """

    def __init__(
        self,
        device: torch.device,
        num_samples: Callable[[], int],
        waited_s: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._device = device
        self._num_samples = num_samples
        self._waited_s = waited_s
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Measure from now on."""
        self._start = self._clock(), self._num_samples(), self._waited_s()

    @property
    def seconds(self) -> float:
        """Seconds since `begin`."""
        return self._clock() - self._start[0]

    def read(self, seconds: float | None = None) -> dict[str, float]:
        """Return "samples_per_s" of all ranks, and of this rank "data_wait", a share, and "memory_gib", a peak.

        `seconds`: what `self.seconds` was a moment ago; None: as it is now. The memory is that of tensors on the
        device since the process began; left out on the CPU.
        """
        seconds = max(self.seconds if seconds is None else seconds, 1e-9)
        _, num_samples, waited_s = self._start
        rates = {"samples_per_s": (self._num_samples() - num_samples) / seconds}
        rates["data_wait"] = min((self._waited_s() - waited_s) / seconds, 1.0)
        memory = peak_bytes(self._device)
        return {**rates, "memory_gib": memory / 2**30} if memory else rates

    def render(self) -> str:
        """Return what the progress display shows: "1.2e+03 samples/s, data 12 %, 3.1 GiB"; "" without samples."""
        rates = self.read()
        if not rates["samples_per_s"]:
            return ""
        parts = [f"{rates['samples_per_s']:.3g} samples/s"]
        if rates["data_wait"] >= 0.05:
            parts.append(f"data {rates['data_wait']:.0%}")
        if "memory_gib" in rates:
            parts.append(f"{rates['memory_gib']:.1f} GiB")
        return ", ".join(parts)


def find_peak_flops(device: torch.device) -> float | None:
    """Return the peak of `device` in FLOP/s, dense and in 16 bits; None if it is unknown."""
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """Return the peak of a device with this name in FLOP/s, dense and in 16 bits; None if it is unknown."""
    words = f" {name.upper().replace('-', ' ')} "
    return next((1e12 * tflops for part, tflops in _PEAK_TFLOPS.items() if f" {part} " in words), None)
