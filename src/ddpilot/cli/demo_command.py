# SPDX-License-Identifier: Apache-2.0
"""``ddpilot demo``: execute the quickstart notebook of a source checkout."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from ddpilot.errors import DdpilotError

INTERRUPT_GRACE_S = 10.0

# Module name and the name of the package that provides it.
_NEEDED = {
    "ipykernel": "ipykernel",
    "matplotlib": "matplotlib",
    "nbclient": "nbclient",
    "nbformat": "nbformat",
    "sklearn": "scikit-learn",
}


def find_quickstart(package_dir: Path) -> Path:
    """Path of the script that runs the quickstart, in the `examples` folder next to `src`.

    Raises `DdpilotError` if ddpilot was installed without its source tree.
    """
    script = package_dir.parents[1] / "examples" / "run_quickstart.py"
    if not script.is_file():
        raise DdpilotError(
            "looking for the quickstart",
            found=f"no {script}: the examples are part of the source tree, not of the installed package",
            fix="Get the source of ddpilot and run `make demo` in it",
        )
    return script


def run_demo() -> int:
    """Execute the quickstart in a Jupyter kernel of this Python. Returns the exit status, 0 on success.

    Raises `DdpilotError` if the examples or a package that they need are missing.
    """
    script = find_quickstart(Path(__file__).resolve().parents[1])
    absent = [package for name, package in _NEEDED.items() if find_spec(name) is None]
    if absent:
        raise DdpilotError(
            "preparing the quickstart",
            found=f"{', '.join(absent)} not installed in {sys.executable}",
            fix=f"Run `{sys.executable} -m pip install {' '.join(absent)}`, or `make demo` in the source tree",
        )
    with subprocess.Popen([sys.executable, str(script)]) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal has sent SIGINT to the script too: give it time to stop its kernel, which would outlive it.
            try:
                process.wait(INTERRUPT_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
