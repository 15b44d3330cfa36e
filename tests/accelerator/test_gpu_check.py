# SPDX-License-Identifier: Apache-2.0
"""`ddpilot gpu-check` on two emulated accelerators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import environment, on_device, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

SHOWN = (
    *("collectives_are_recorded", "synchronous_collectives_are_followed", "ddp_buckets_of_a_pair", "hang_is_named"),
    *("stuck_rank_is_freed", "in_flight_is_followed", "stand_in_keeps_the_context"),
    "trainer_of_two_has_the_cpus_numbers",
)
IN_ITS_PROCESS = "devices_by_uuid"
ONLY_CUDA = ("no_context_at_import", "masked_devices", "mig_slices", "capture_under_guard")


def outcomes(names: list[str]) -> dict[str, list[str]]:
    """Status and evidence of each of the checks `names`, one after the other in this process."""
    from ddpilot.gpu_check.child import run_check

    found = {name: run_check(name) for name in names}
    return {name: [outcome.status, outcome.evidence] for name, outcome in found.items()}


@pytest.mark.timeout(400)  # the library may have to be compiled first
def test_checks_show_on_emulated_devices_what_is_not_of_cuda_alone() -> None:
    """Pairs form, buckets are recorded, a hang is named and a stuck rank freed; all launches share a rank server."""
    found = on_device.call(f"{__name__}:outcomes", list(SHOWN), limit_s=300)
    assert {name: status for name, (status, _) in found.items()} == dict.fromkeys(SHOWN, "ok"), found


@pytest.mark.timeout(200)
def test_gpu_check_runs_each_check_in_its_process_and_leaves_out_what_asks_cuda(tmp_path: Path) -> None:
    """The report has each check; the first line names the devices."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "ddpilot", "gpu-check", IN_ITS_PROCESS, *ONLY_CUDA, "--json", str(report)],
        env={**os.environ, **environment(2)},
        capture_output=True,
        text=True,
        timeout=190,
        check=False,
    )
    found = {check["name"]: check["status"] for check in json.loads(report.read_text())["checks"]}
    assert found == {IN_ITS_PROCESS: "ok", **dict.fromkeys(ONLY_CUDA, "cannot be shown")}, done.stdout
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].startswith("2 x ")
