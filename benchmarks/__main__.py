# SPDX-License-Identifier: Apache-2.0
"""Run every benchmark in a process of its own and print one table; exit status 1 when a bar does not hold."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version

from benchmarks.measure import Row, render_table

SCRIPTS = (
    "startup",
    "lint_files",
    "launch_latency",
    "many_ranks",
    "run_output",
    "idle_memory",
    "result_copy",
    "fifty_launches",
    "random_faults",
    "record_overhead",
    "guard_overhead",
    "watch_overhead",
    "session_start",
    "session_cells",
    "random_cells",
    "checkpoint_stall",
    "same_numbers",
    "sharding_cost",
    "step_cost",
    "guard_data_cost",
    "profile_cost",
    "profile_causes",
    "tune",
    "scale_prediction",
)


def run_script(name: str) -> list[Row]:
    """The rows of one script; its progress goes to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode not in (0, 1) or not lines:
        failed = f"exit status {done.returncode}"
        return [Row(what=name, ours=failed, peer="", ratio="", bar="it runs", holds=False)]
    return [Row(**row) for row in json.loads(lines[-1])]


def main() -> int:
    """Run all scripts, one after another."""
    rows = []
    for name in SCRIPTS:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        rows += run_script(name)
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}\n")
    print(render_table(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
