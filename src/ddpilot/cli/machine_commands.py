# SPDX-License-Identifier: Apache-2.0
"""``ddpilot gpu-check`` and ``topology``: check and describe this machine and process."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ddpilot.environments.detect import detect_topology
from ddpilot.errors import DdpilotError
from ddpilot.gpu_check.catalogue import CHECKS, choose_checks
from ddpilot.gpu_check.runner import render_summary, run_checks

FAILED_STATUS = 1
REPORT = Path("ddpilot-gpu-check.json")


def check_gpus(names: Sequence[str], *, json_path: Path = REPORT, limit_s: float | None = None) -> int:
    """Run the checks in `names`, or all, and print a line for each. Returns the exit status, 1 if a check FAILED.

    `limit_s`: seconds for each check, overriding its own limit. Raises DdpilotError before the first check for an
    unknown name, a limit that is not positive, and a report file that cannot be written.
    """
    checks = choose_checks(names)
    if limit_s is not None and not limit_s > 0:
        raise DdpilotError("reading --time-limit-s", found=f"{limit_s:g}", fix="Give seconds, more than 0")
    results = run_checks(checks, json_path=json_path, limit_s=limit_s, show=lambda line: print(line, flush=True))
    print(render_summary(results, json_path))
    return FAILED_STATUS if any(each.outcome.status == "failed" for each in results) else 0


def list_checks() -> str:
    """One line for each check: its name, its requirement and its claim."""
    return "\n".join(f"{check.name:<33}  {check.needs:<9}  {check.claim}" for check in CHECKS)


def describe_topology(*, as_json: bool = False) -> str:
    """The topology that `detect_topology` finds in this process's environment, as a table or one JSON object.

    Raises `TopologyError` if the environment is incomplete or inconsistent.
    """
    topology = detect_topology(os.environ)
    return json.dumps(asdict(topology), indent=2) if as_json else str(topology)
