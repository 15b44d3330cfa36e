# SPDX-License-Identifier: Apache-2.0
"""The process of the tests has its CUDA context before the first look for leftovers: the driver's files stay open."""

from __future__ import annotations

import os

import pytest

from ddpilot.environments.nvml import count_accelerators


@pytest.fixture(scope="session", autouse=True)
def cuda_is_in_use() -> None:
    """Use what opens files of the driver: a context, a library of kernels, a backward pass, a stream, pinned memory."""
    if count_accelerators(os.environ) == 0:
        return
    import torch

    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.ones(64, pin_memory=True).to("cuda", non_blocking=True)
    torch.cuda.synchronize()
