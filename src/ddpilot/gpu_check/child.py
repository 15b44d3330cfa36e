# SPDX-License-Identifier: Apache-2.0
"""The process of one check: `python -m ddpilot.gpu_check.child NAME RESULT_FILE LIMIT_S`.

The result is written to a file instead of stdout, to which libraries and ranks write too.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import platform
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddpilot.environments.nvml import read_driver_version
from ddpilot.gpu_check.catalogue import CannotBeShownError, Outcome, find_check
from ddpilot.module_names import GPU_CHECKS

FACTS = "facts"
"""Used instead of a check's name: the result is that of `read_facts`."""

_STACKS_BEFORE_LIMIT_S = 5.0


def main(name: str, result: str, limit_s: str) -> None:
    """Run the check `name` and write its outcome to the file `result` as JSON.

    Five seconds before `limit_s`, but not in the first second, the stacks of all threads are written to stderr.
    """
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, float(limit_s) - _STACKS_BEFORE_LIMIT_S))
    value = read_facts() if name == FACTS else asdict(run_check(name))
    draft = Path(f"{result}.new")
    draft.write_text(json.dumps(value))
    os.replace(draft, result)
    faulthandler.cancel_dump_traceback_later()


def run_check(name: str) -> Outcome:
    """Return the outcome of the check `name`; an exception is a failure, with its place in the source as evidence."""
    check = find_check(name)
    try:
        function = getattr(importlib.import_module(f"{GPU_CHECKS}.{check.module}"), check.name)
        outcome = function()
        assert isinstance(outcome, Outcome)
        return outcome
    except CannotBeShownError as error:
        return Outcome(status="cannot be shown", evidence=str(error))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - an exception is the check's result
        traceback.print_exc()
        found = traceback.extract_tb(error.__traceback__)
        place = f" at {Path(found[-1].filename).name}:{found[-1].lineno}" if found else ""
        return Outcome(status="failed", evidence=f"{type(error).__name__}{place}: {error}")


def read_facts() -> dict[str, Any]:
    """Return versions and devices of this machine for the report, without its name or addresses."""
    import torch

    from ddpilot.gpu_check.checks.accelerator import accelerator_kind, count_devices

    kind = accelerator_kind()
    module = None if kind == "cpu" else torch.get_device_module(kind)
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl_version(),
        "driver": read_driver_version(),
        "kind": kind,
        "devices": [_describe_device(module, index) for index in range(count_devices())],
    }


def _describe_device(module: Any, index: int) -> dict[str, Any]:
    if not hasattr(module, "get_device_properties"):
        return {"name": f"device {index}"}
    properties = module.get_device_properties(index)
    total = getattr(properties, "total_memory", None)
    return {
        "name": str(getattr(properties, "name", f"device {index}")),
        "memory_gib": None if total is None else round(total / 2**30, 1),
        "capability": None if not hasattr(properties, "major") else f"{properties.major}.{properties.minor}",
    }


def _nccl_version() -> str | None:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(*sys.argv[1:])
