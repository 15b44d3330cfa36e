# SPDX-License-Identifier: Apache-2.0
"""``ddpilot doctor``: check this machine, or all nodes of a job, before a job runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ddpilot.diagnose.doctor import doctor


def run_doctor(*, checkpoint_dir: Path, as_json: bool, verbose: bool, **options: Any) -> int:
    """Print what `doctor` finds with `options`. Returns the exit status: 1 if there is an error, otherwise 0.

    Of the ranks of a job, rank 0 prints the diagnosis and has its exit status; a rank that cannot reach it, too.
    """
    found = doctor(checkpoint_dir=checkpoint_dir, **options)
    if not found.is_shown:
        return 0
    if as_json:
        print(json.dumps(found.to_dict(), indent=1, ensure_ascii=False), flush=True)
    else:
        print(found.render(verbose=verbose, color=sys.stdout.isatty()), flush=True)
    return found.exit_status
