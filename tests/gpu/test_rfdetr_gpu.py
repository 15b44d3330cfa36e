# SPDX-License-Identifier: Apache-2.0
"""RF-DETR on GPUs through our mapping: one rank for each, two of them at most."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpilot.environments.nvml import count_accelerators
from tests.dist.integrations.test_rfdetr import needs_rfdetr, run_rfdetr

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_accelerators(os.environ) == 0, reason="no NVIDIA device is visible to NVML here"),
    needs_rfdetr,
    pytest.mark.timeout(300),
]


def test_rfdetr_trains_after_the_notebook_used_the_gpu(tmp_path: Path) -> None:
    """Nothing is on a GPU before the first use; then it trains on all ranks, predicts and exports."""
    devices = min(2, count_accelerators(os.environ))
    told, printed = run_rfdetr(
        tmp_path, strategy="ddp_notebook", device="", train=f'devices={devices}, accelerator="gpu"'
    )
    assert f"MEMBER: {devices}/{devices}" in printed
    assert told["changed"] > told["of"] // 2
    assert told["found"] == "Detections"
    assert told["cuda"] == [False, False]
