# SPDX-License-Identifier: Apache-2.0
"""Run every program of a folder in this rank, and print which of them train."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ddpilot.lint.notebook import read_notebook


def run(path: Path) -> bool:
    """Run a script's `main`, or the cells of a notebook; return what it says about its training."""
    torch.manual_seed(0)
    text = path.read_text()
    names: dict[str, object] = {"__name__": path.stem}
    exec(compile(read_notebook(text)[0] if path.suffix == ".ipynb" else text, str(path), "exec"), names)
    main = names.get("main")
    return bool(main(str(path.parent)) if callable(main) else names["trains"])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for each in sorted([*Path(sys.argv[1]).glob("*.py"), *Path(sys.argv[1]).glob("*.ipynb")]):
        print(f"rank {os.environ['RANK']}: {each.name} trains: {run(each)}", flush=True)
    dist.destroy_process_group()
