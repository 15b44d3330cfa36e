# SPDX-License-Identifier: Apache-2.0
"""Run functions of a test module on ranks that have the emulated accelerator, each in a process of its own.

Started as a program, this file is one rank: `python ranks.py FILE NAME ...` runs the named functions one after the
other and prints a line for each that returned.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = "result of "
NUM_LAST_LINES = 25


@dataclass(frozen=True)
class Ended:
    """One rank that has ended."""

    rank: int
    status: int | None
    """Exit status, minus the signal's number where one ended it, or None where it was stopped at the limit."""
    text: str
    """Everything that it printed."""

    @property
    def results(self) -> dict[str, Any]:
        """What the functions returned that came to their end, by name."""
        lines = [line.removeprefix(RESULT) for line in self.text.splitlines() if line.startswith(RESULT)]
        return dict(json.loads(line) for line in lines)

    def describe(self) -> str:
        """The rank's status and its last lines."""
        how = "was stopped at the limit" if self.status is None else f"ended with status {self.status}"
        return f"rank {self.rank} {how}:\n" + "\n".join(self.text.splitlines()[-NUM_LAST_LINES:])


def run(
    file: str, *names: str, num_ranks: int, limit_s: float, until_rank_0: bool = False, **variables: str
) -> list[Ended]:
    """Run the functions `names` of the module `file` on each rank, and return how each rank ended.

    `until_rank_0` stops the others when rank 0 has ended.
    """
    from tests.accelerator import environment

    with tempfile.TemporaryDirectory() as folder:
        shared = {**os.environ, **environment(num_ranks), "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
        shared |= {"MEETING_FILE": f"{folder}/store", "PYTHONUNBUFFERED": "1", **variables}
        started = []
        for rank in range(num_ranks):
            output = open(f"{folder}/{rank}", "w+")
            command = [sys.executable, __file__, file, *names]
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=own, cwd=ROOT)
            started.append((process, output))
        deadline = time.monotonic() + limit_s
        first = _end(0, *started[0], deadline)
        if until_rank_0:
            deadline = 0.0
        return [first, *(_end(rank, *one, deadline) for rank, one in enumerate(started[1:], start=1))]


def run_to_the_end(file: str, *names: str, num_ranks: int, limit_s: float, **variables: str) -> list[dict[str, Any]]:
    """As `run`, but fails with every rank's last lines unless all ended well; returns what the functions returned."""
    ended = run(file, *names, num_ranks=num_ranks, limit_s=limit_s, until_rank_0=False, **variables)
    assert all(one.status == 0 for one in ended), "\n".join(one.describe() for one in ended)
    return [one.results for one in ended]


def _end(rank: int, process: subprocess.Popen[bytes], output: Any, deadline: float) -> Ended:
    try:
        status: int | None = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # prints every thread's stack
        time.sleep(0.5)
        process.kill()
        process.wait()
        status = None
    with output:
        output.seek(0)
        return Ended(rank, status, output.read())


def join(backend: str = "eccl", **options: Any) -> tuple[int, int, Any]:
    """Join the group of all ranks and choose this rank's device; return rank, number of ranks and device."""
    import torch
    import torch.distributed as dist

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("emu", rank)
    torch.accelerator.set_device_index(rank)
    where = "file://" + os.environ["MEETING_FILE"]
    if not dist.is_initialized():
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=num_ranks, **options)
    return rank, num_ranks, device


def _main(file: str, names: list[str]) -> None:
    faulthandler.register(signal.SIGUSR1)
    sys.path.insert(0, str(ROOT))
    spec = importlib.util.spec_from_file_location("cases", file)
    assert spec is not None
    assert spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = cases
    spec.loader.exec_module(cases)
    for name in names:
        print(f"{name} begins", flush=True)
        print(RESULT + json.dumps([name, getattr(cases, name)()]), flush=True)


if __name__ == "__main__":
    try:
        _main(sys.argv[1], sys.argv[2:])
    except BaseException:  # noqa: BLE001 - shown, and the process ends
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # without waiting for the others in a destructor
    sys.exit(0)
