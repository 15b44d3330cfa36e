# SPDX-License-Identifier: Apache-2.0
"""``ddpilot doctor``: check this machine, or all nodes of a job, before a job runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ddpilot.diagnose.doctor import doctor


def run_doctor(
    *,
    nproc_per_node: int | None,
    num_workers: int | None,
    checkpoint_dir: Path,
    live: bool,
    as_json: bool,
    verbose: bool,
) -> int:
    """Print what `doctor` finds. Returns the exit status: 1 if there is an error, otherwise 0."""
    found = doctor(nproc_per_node=nproc_per_node, num_workers=num_workers, checkpoint_dir=checkpoint_dir, live=live)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1, ensure_ascii=False))
    else:
        print(found.render(verbose=verbose, color=sys.stdout.isatty()))
    return found.exit_status
