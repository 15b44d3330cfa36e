# SPDX-License-Identifier: Apache-2.0
"""Saves into a small file system, given as the argument: a small one, two that do not fit, and a small one again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.manifest import RunProgress

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    good = []
    with CheckpointDir(folder) as directory:
        directory.check_writable()
        for step, size in ((1, 10), (2, 1_000_000), (3, 1_000_000), (4, 10)):
            directory.save(RunProgress(step=step), weights={"model": {"w": torch.ones(size)}})
            good.append(directory.wait())
        latest = directory.latest()
        assert latest is not None
        found = {
            "good": good,
            "steps": [int(name.split("-")[-1]) for name in reversed(directory.names())],
            "latest": latest.manifest.progress.step,
            "entries": sorted(path.name for path in folder.iterdir()),
        }
    print(json.dumps(found))
