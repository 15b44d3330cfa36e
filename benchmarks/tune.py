# SPDX-License-Identifier: Apache-2.0
"""`ddpilot tune` on programs with a known best option, and on programs that nothing helps.

The best option is known from how a program is built (`benchmarks/tune_cases.py`): a loader that sleeps 80 ms for each
batch needs 4 workers to keep up with updates of 20 ms; a link that takes 60 ms for each bucket wants all gradients in
one; a link of 200 MB/s wants small buckets, which it exchanges during a long backward pass; and buckets in the order of
definition, which `find_unused_parameters=True` leaves them in, cannot be exchanged during a backward pass that goes the
other way. All times are sleeps, so that other programs on the machine disturb them little.
Nothing helps where a link takes as long for all buckets together, whatever their size, and there is no backward pass to
hide them behind; nor where updates only compute.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, main

SCRIPT = Path(__file__).with_name("tune_cases.py")
BEST: dict[str, tuple[str, ...]] = {
    "loader": ("num_workers=4",),
    "buckets": ("bucket_cap_mb=25",),
    "overlap": ("bucket_cap_mb=10",),
    "find_unused": ("find_unused_parameters=False", "static_graph=True"),
}
"""By case, the options that are known to be best: for the last one two that have the same effect."""
WITHOUT = ("computation", "bandwidth")
NUM_UPDATES, MAX_MINUTES = 28, 12


def tune(case: str, rounds: int) -> dict[str, Any]:
    """The result of `ddpilot tune` on two ranks; its progress goes to stderr."""
    words = ["-n", 2, "--json", "--updates", NUM_UPDATES, "--rounds", rounds, "--max-minutes", MAX_MINUTES, "--", case]
    command = [sys.executable, "-m", "ddpilot", "tune", SCRIPT, *words]
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def describe(found: dict[str, Any]) -> str:
    """What helps and by how much."""
    gain = found["gain"]
    if gain is None:
        return f"nothing helps, of {len(found['tried'])} options"
    return f"{', '.join(found['helps'])}: {gain['factor']:.2f}x ({gain['low']:.2f}-{gain['high']:.2f})"


def measure(rounds: int) -> list[Row]:
    """The bars."""
    rows = []
    for case, best in [*BEST.items(), *((case, ()) for case in WITHOUT)]:
        print(f"tuning {case} ...", file=sys.stderr, flush=True)
        found = tune(case, rounds)
        rows.append(
            Row(
                what=f"tune: {case}",
                ours=describe(found),
                peer="",
                ratio=f"{found['num_runs']} runs, {found['wall_s'] / 60:.1f} min",
                bar=f"finds {' or '.join(best)}" if best else "nothing helps",
                holds=bool({*best} & {*found["helps"]}) if best else not found["helps"],
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, rounds=4))
