# SPDX-License-Identifier: Apache-2.0
"""Call a function of the tests in a process that has the emulated accelerator."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.accelerator import environment

ROOT = Path(__file__).parents[2]


def call(function: str, *args: Any, limit_s: float, num_devices: int = 2) -> Any:
    """What `function`, such as ``tests.accelerator.zoo:judge_cases``, returns there. All of it has to be JSON."""
    command = [sys.executable, "-m", __spec__.name, function, json.dumps(args)]
    env = {**os.environ, **environment(num_devices)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, (
        f"{function}: exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    module, name = sys.argv[1].split(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    print("\n" + json.dumps(result))
