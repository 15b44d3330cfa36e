# SPDX-License-Identifier: Apache-2.0
"""`ddpilot gpu-check` on two emulated accelerators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import environment, why_not
from tests.soak import soak

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

SHOWN = (
    *("hang_is_named", "devices_by_uuid", "collectives_are_recorded", "ddp_buckets_of_a_pair"),
    *("synchronous_collectives_are_followed", "stuck_rank_is_freed", "in_flight_is_followed"),
    *("stand_in_keeps_the_context", "trainer_of_two_has_the_cpus_numbers", "profile_has_device_times"),
)
ONLY_CUDA = ("no_context_at_import", "masked_devices", "mig_slices", "capture_under_guard")


@soak
@pytest.mark.timeout(400)  # the library may have to be compiled first
def test_gpu_check_shows_on_emulated_devices_what_is_not_of_cuda_alone(tmp_path: Path) -> None:
    """A hang of a pair is named, and each device found; what asks CUDA is left out.

    What is shown, other tests of this folder check too, in a process of their own.
    """
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "ddpilot", "gpu-check", *SHOWN, *ONLY_CUDA, "--json", str(report)],
        env={**os.environ, **environment(2)},
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    found = {check["name"]: check["status"] for check in json.loads(report.read_text())["checks"]}
    assert found == {**dict.fromkeys(SHOWN, "ok"), **dict.fromkeys(ONLY_CUDA, "cannot be shown")}, done.stdout
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].startswith("2 x ")
