# SPDX-License-Identifier: Apache-2.0
"""Links between ranks and their expected bandwidth: loopback, a network interface, NVLink or PCIe."""

from __future__ import annotations

import os
from typing import Any

import psutil

from ddpilot.diagnose.gpus import read_gpu_states

LOOPBACK = "loopback"


def find_link(uuid: str, nnodes: int, nvml: Any = None) -> tuple[str, float | None]:
    """The link of a rank to other ranks, and its bytes per second in one direction; None if unknown.

    `uuid`: of the NVIDIA device whose backend exchanges the data, "" if that is gloo.
    """
    if nnodes > 1:
        name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        return name or "the network", _interface_speed(name)
    if not uuid:
        return LOOPBACK, None
    for state in read_gpu_states(nvml):
        if state.uuid.removeprefix("GPU-") == uuid.removeprefix("GPU-"):
            kind = f"NVLink ({state.num_nvlinks} links)" if state.num_nvlinks else "PCIe"
            return kind, state.link_bytes_per_s
    return "an unknown link", None


def _interface_speed(name: str) -> float | None:
    """Bytes per second of a network card; None for a virtual interface, whose speed is nominal."""
    stats = psutil.net_if_stats().get(name)
    is_card = os.path.exists(f"/sys/class/net/{name}/device")
    return stats.speed * 1e6 / 8 if stats is not None and stats.speed and is_card else None
