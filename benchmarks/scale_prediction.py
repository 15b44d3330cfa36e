# SPDX-License-Identifier: Apache-2.0
"""How well `ddpilot scale`, fitted at 1 and 2 ranks, predicts the step at 4, over links that are simulated.

The programs are those of benchmarks/delayed_ring.py: one whose exchange takes long for its bytes, one for its many
steps, and one whose ranks wait for the slowest of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.delayed_ring import CASES
from benchmarks.measure import Row, main

ERROR = 0.15
SCRIPT = Path(__file__).with_name("delayed_ring.py")


def predict(case: str, rounds: int) -> dict[str, Any]:
    """What `ddpilot scale` says of a case."""
    command = [sys.executable, "-m", "ddpilot", "scale", str(SCRIPT), "-n", "1,2,4", "--rounds", str(rounds), "--json"]
    done = subprocess.run([*command, "--", case], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(rounds: int) -> list[Row]:
    """The bars."""
    rows = []
    for case in CASES:
        found = predict(case, rounds)
        held_out = found["held_out"]
        speed_ups = ", ".join(f"{row['speed_up']:.2f}" for row in found["rows"])
        rows.append(
            Row(
                what=f"step at 4 ranks, fitted at 1 and 2: {case}",
                ours=f"{held_out['predicted_s'] * 1e3:.1f} ms",
                peer=f"measured: {held_out['measured_s'] * 1e3:.1f} ms (speed-up {speed_ups})",
                ratio=f"{abs(held_out['error']):.0%} off",
                bar=f"within {ERROR:.0%}",
                holds=abs(held_out["error"]) <= ERROR,
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, rounds=2))
