# SPDX-License-Identifier: Apache-2.0
"""Measure how long an all_reduce takes, by size. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_MANY, _FEW = 20, 5
"""Number of times that a small and a large message is measured."""
_SMALL_BYTES = 1_000_000


def time_calls(call: Callable[[], object], device: torch.device, num_bytes: int) -> list[float]:
    """Return the seconds of each of some calls, after one that is not counted."""
    times_s = []
    for _ in range(1 + (_MANY if num_bytes <= _SMALL_BYTES else _FEW)):
        began_s = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times_s.append(time.perf_counter() - began_s)
    return times_s[1:]


def time_all_reduce(process_group: Any, device: torch.device, sizes: Sequence[int]) -> list[list[float]]:
    """Return the seconds of some all_reduces in `process_group` for each of `sizes`, in bytes. Collective.

    The group is called directly, so that what observes `torch.distributed` does not take them for the program's.
    """
    found = []
    for num_bytes in sizes:
        tensor = torch.zeros(max(1, num_bytes // 4), device=device)
        found.append(time_calls(lambda tensor=tensor: process_group.allreduce([tensor]).wait(), device, num_bytes))  # type: ignore[misc]
    return found
