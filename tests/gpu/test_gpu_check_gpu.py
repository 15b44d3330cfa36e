# SPDX-License-Identifier: Apache-2.0
"""Each check of `ddpilot gpu-check` as a test.

No other machine can show these: contexts and forks are the CUDA driver's, what an aborted kernel leaves is NCCL's, a
device-side assert, a captured graph, pinned memory and MIG have no counterpart on the CPU or the emulated accelerator.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ddpilot.environments.nvml import count_accelerators
from ddpilot.gpu_check.catalogue import CHECKS, Check
from ddpilot.gpu_check.runner import read_facts, run_checks, why_not

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_accelerators(os.environ) == 0, reason="no NVIDIA device is visible to NVML here"),
    pytest.mark.timeout(300),
]


@cache
def facts() -> dict[str, Any]:
    """This machine's devices and versions."""
    return read_facts()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_claim_holds_on_this_machine(check: Check, tmp_path: Path) -> None:
    """It is ok, or skipped with what this machine lacks; a failure has the evidence and what was printed."""
    if why := why_not(check, facts(), []):
        pytest.skip(why)
    (result,) = run_checks([check], json_path=tmp_path / "report.json")
    if result.outcome.status == "cannot be shown":
        pytest.skip(result.outcome.evidence)
    assert result.outcome.status == "ok", f"{result.outcome.evidence}\n{result.output}"
