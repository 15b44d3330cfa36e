# SPDX-License-Identifier: Apache-2.0
"""`import ddpilot` and `ddpilot --help`, against `import torch` and `torchrun --help`."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Row, alternate, main, render_values, seconds

IMPORT_LIMIT_S = 0.05
HELP_LIMIT_S = 0.4
SCRIPTS = Path(sys.executable).parent


def time_import(module: str) -> tuple[float, bool]:
    """Seconds that the import takes in a fresh interpreter, and whether torch is loaded after it."""
    code = (
        "import sys, time; start = time.perf_counter(); "
        f"import {module}; print(time.perf_counter() - start, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    taken, has_torch = done.stdout.split()
    return float(taken), has_torch == "True"


def time_help(command: str) -> float:
    """Seconds from starting `command --help` to its end."""
    argv = [str(SCRIPTS / command), "--help"]
    return seconds(lambda: subprocess.run(argv, capture_output=True, check=True))


def measure(rounds: int) -> list[Row]:
    """Both bars, `rounds` times each."""
    imports, torch_imports = alternate(lambda: time_import("ddpilot")[0], lambda: time_import("torch")[0], rounds)
    helps, torch_helps = alternate(lambda: time_help("ddpilot"), lambda: time_help("torchrun"), rounds)
    is_free = not time_import("ddpilot")[1]
    import_s, help_s = statistics.median(imports), statistics.median(helps)
    return [
        Row(
            what="`import ddpilot`, `import torch`",
            ours=render_values(imports),
            peer=render_values(torch_imports),
            ratio=f"1/{statistics.median(torch_imports) / import_s:.0f}",
            bar="under 50 ms, without torch",
            holds=import_s < IMPORT_LIMIT_S and is_free,
        ),
        Row(
            what="`ddpilot --help`, `torchrun --help`",
            ours=render_values(helps),
            peer=render_values(torch_helps),
            ratio=f"1/{statistics.median(torch_helps) / help_s:.0f}",
            bar="under 0.4 s",
            holds=help_s < HELP_LIMIT_S,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=5))
