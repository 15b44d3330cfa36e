# SPDX-License-Identifier: Apache-2.0
"""What a group is made with, decided from its backend, device and size."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from ddpilot.group.creation import binds_device, device_timeout, is_backend

BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("backend", "device", "world_size", "expected"),
    [
        (BOTH, "cuda:0", 2, True),
        ("nccl", "cuda:0", 2, True),
        ("cpu:gloo,npu:hccl", "cuda:0", 2, False),
        (BOTH, "cuda:0", 1, False),
        ("gloo", "cuda:0", 2, False),
        ("gloo", "cpu", 2, False),
    ],
)
def test_binds_device_where_a_first_collective_would_wait_without_end(
    backend: str, device: str, world_size: int, expected: bool
) -> None:
    """The communicator of a device is made while all ranks are known to be there; alone, and with gloo, nothing is."""
    assert binds_device(backend, torch.device(device), world_size) is expected


def test_device_timeout_is_torchs_own_for_nccl_unless_one_is_given() -> None:
    """torch compares the name of the whole backend, and would take gloo's 30 minutes for both."""
    gpu = torch.device("cuda:0")
    assert device_timeout(BOTH, gpu, None) == device_timeout("nccl", gpu, None) == timedelta(minutes=10)
    assert device_timeout(BOTH, gpu, 5.0) is None
    assert device_timeout("gloo", gpu, None) is None


@pytest.mark.parametrize(
    ("asked", "has", "kind", "expected"),
    [
        ("nccl", BOTH, "cuda", True),
        ("gloo", BOTH, "cpu", True),
        ("gloo", BOTH, "cuda", False),
        ("nccl", "cpu:gloo,cuda:gloo", "cuda", False),
        ("gloo", "cpu:gloo,cuda:gloo", "cuda", True),
        (BOTH, BOTH, "cuda", True),
        ("cuda:nccl", BOTH, "cuda", True),
        ("mpi", BOTH, "cuda", False),
    ],
)
def test_is_backend_takes_the_name_of_the_devices_backend(asked: str, has: str, kind: str, expected: bool) -> None:
    """`DDPILOT_BACKEND=nccl` and a group that user code made for both kinds of tensors belong together."""
    assert is_backend(asked, has, kind) is expected
