# SPDX-License-Identifier: Apache-2.0
"""What counts as out of memory, and what its error advises."""

from __future__ import annotations

import pytest
import torch

from ddpilot import FakeGroup
from ddpilot.group.device import is_out_of_memory
from ddpilot.training.coordination.out_of_memory import explain_out_of_memory, find_sharing, joint_try


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_is_out_of_memory_knows_how_it_is_said(error: Exception, expected: bool) -> None:
    """By torch for GPUs, for the CPU, by its libraries, and by Python."""
    assert is_out_of_memory(error) is expected


def test_a_shared_device_comes_first_in_the_advice() -> None:
    """Of several ranks on one device each has a part of its memory only."""
    error = explain_out_of_memory(MemoryError(), FakeGroup(1, 4), sharing=(0, 3))
    assert error.fix.startswith("First give each rank a device of its own: rank 1 shares cpu with 0, 3. Use a smaller")
    assert "MemoryError" in error.found
    assert find_sharing(FakeGroup(1, 4)) == ()


def test_joint_try_alone_says_whether_it_fitted() -> None:
    """Real memory, far more than any machine has."""
    outcome = joint_try(lambda: torch.zeros(2**50), FakeGroup())
    assert (outcome.value, outcome.ran_out) == (None, (0,))
    assert joint_try(lambda: 5, FakeGroup()).value == 5
