# SPDX-License-Identifier: Apache-2.0
"""What a rank of a submitted function runs: ``python -m ddpilot.slurm.function_rank FOLDER``, started by srun.

The folder is shared with the process that submitted the function: it has the call, and gets each rank's value or error.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import types
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from ddpilot.launching.exception_report import report_exception
from ddpilot.launching.shipping.memory_file import map_private
from ddpilot.launching.shipping.pickling import importable_from_main, open_parcel, pack_parcel
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.module_names import SPAWNED_MAIN
from ddpilot.user_files import install_sources

CALL, SETTINGS = "call.parcel", "call.json"


def result_path(folder: Path, rank: int) -> Path:
    """Where rank `rank` writes what the function returned."""
    return folder / f"result.{rank}.parcel"


def error_path(folder: Path, rank: int) -> Path:
    """Where rank `rank` writes what the function raised: a report in JSON; the exception is in a parcel next to it."""
    return folder / f"error.{rank}.json"


def read_parcel(path: Path) -> memoryview:
    """Map a parcel's file; its pages are read when they are touched."""
    with open(path, "rb") as file:
        return map_private(file.fileno())


def write_parcel(path: Path, memory_file: int) -> None:
    """Write a memory file to `path`, which is there in full or not at all; closes the memory file."""
    try:
        write_atomically(path, map_private(memory_file))
    finally:
        os.close(memory_file)


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Write a file that other machines see in full or not at all."""
    unfinished = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}")
    with open(unfinished, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def run_function(folder: Path) -> None:
    """Run the function in `folder` as the rank of RANK, and write its value. Raises what the function raises."""
    rank = int(os.environ["RANK"])
    for stale in (result_path(folder, rank), error_path(folder, rank)):
        stale.unlink(missing_ok=True)  # of before a requeue
    known: list[Any] = []
    try:
        name = _become(folder)
        (function, args, kwargs), known = open_parcel(read_parcel(folder / CALL))
        vars(sys.modules["__main__"]).update(importable_from_main(known))
        value = function(*args, **kwargs)
        did = f"could not write what `{name}` returned"
        parcel, _ = ship("ddpilot-result", {"result": value}, value, did=did, known=known)
        write_parcel(result_path(folder, rank), parcel)
    except BaseException as error:
        _write_error(folder, rank, error, known)
        raise


def _become(folder: Path) -> str:
    """Take over path and arguments of the process that submitted, with an empty ``__main__``; the function's name."""
    from ddpilot.launching.rank_server.rank import PARCEL_VARIABLE

    os.environ[PARCEL_VARIABLE] = str(folder / CALL)  # for DataLoader workers that are not forked
    settings = json.loads((folder / SETTINGS).read_text())
    sys.path[:] = settings["sys_path"]
    sys.argv[:] = settings["argv"]
    install_sources(settings["sources"])
    main = types.ModuleType("__main__")
    main.__spec__ = ModuleSpec(SPAWNED_MAIN, None)
    vars(main).update(settings["main"])
    sys.modules["__main__"] = main
    return str(settings["function_name"])


def _write_error(folder: Path, rank: int, error: BaseException, known: list[Any]) -> None:
    report = asdict(report_exception(error))
    report["time_s"] = time.time()  # clocks of nodes agree to some milliseconds; monotonic ones do not at all
    report["host"] = platform.node()
    try:
        parcel = pack_parcel("ddpilot-error", error, known)[0]
        write_parcel(error_path(folder, rank).with_suffix(".parcel"), parcel)
    except Exception as unpicklable:  # noqa: BLE001  # pickling runs the exception's own code; the report has its text
        print(f"ddpilot: {type(error).__name__} cannot be pickled: {unpicklable}", file=sys.stderr)  # noqa: T201
    write_atomically(error_path(folder, rank), json.dumps(report).encode())


if __name__ == "__main__":
    run_function(Path(sys.argv[1]))
