# SPDX-License-Identifier: Apache-2.0
"""A job of 2 ranks that prints 200,000 lines, under `ddpilot run` and under torchrun, which labels and joins none."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.measure import Row, alternate, main, render_values, seconds

NUM_RANKS = 2
NUM_LINES = 200_000
LIMIT = 1.5
SCRIPT = """\
import os, sys
same, num_lines = sys.argv[1] == "same", int(sys.argv[2])
label = "" if same else f"rank {os.environ['RANK']} "
for step in range(num_lines):
    print(f"{label}step {step} loss {step * 0.001:.4f}")
"""
OURS = ("-m", "ddpilot", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def run(launcher: Sequence[str], script: Path, kind: str) -> None:
    """Run the job with its output in a file; no line may be missing there."""
    words = ["--nproc-per-node", str(NUM_RANKS), str(script), kind, str(NUM_LINES // NUM_RANKS)]
    with tempfile.TemporaryFile() as output:
        subprocess.run([sys.executable, *launcher, *words], stdout=output, stderr=subprocess.DEVNULL, check=True)
        output.seek(0)
        num_lines = sum(2 if line.startswith(b"[ranks 0,1]") else 1 for line in output)
        assert num_lines == NUM_LINES, f"{num_lines} of {NUM_LINES} lines"


def measure(rounds: int) -> list[Row]:
    """The bar: at most 1.5 times torchrun's time, for lines that differ from rank to rank and for equal ones."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "print_lines.py"
        script.write_text(SCRIPT)
        for kind in ("different", "same"):
            ours, torchrun = alternate(
                partial(seconds, partial(run, OURS, script, kind)),
                partial(seconds, partial(run, TORCHRUN, script, kind)),
                rounds,
            )
            ratio = statistics.median(ours) / statistics.median(torchrun)
            rows.append(
                Row(
                    what=f"{NUM_LINES} lines of {NUM_RANKS} ranks, {kind} on each",
                    ours=render_values(ours),
                    peer=f"torchrun {render_values(torchrun)}",
                    ratio=f"{ratio:.2f}",
                    bar="at most 1.5",
                    holds=ratio <= LIMIT,
                )
            )
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, rounds=5))
