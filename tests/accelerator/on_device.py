# SPDX-License-Identifier: Apache-2.0
"""Call functions of the tests in processes that have the emulated accelerator: in one, or on ranks.

Started as a program it is one such process: it calls what it is given, one after the other, and prints a line for each
that returned. Arguments and results have to be JSON.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.accelerator import environment

ROOT = Path(__file__).parents[2]
RESULT = "result of "
NUM_LAST_LINES = 60


@dataclass(frozen=True)
class Ended:
    """One process that has ended."""

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


class _Process:
    """One that calls the functions `names` of `module`, each with `args`, and writes what it prints into a file."""

    def __init__(
        self, module: str, names: Sequence[str], args: Sequence[Any] = (), *, env: Mapping[str, str], rank: int = 0
    ) -> None:
        self.rank = rank
        self._output = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-m", __spec__.name, json.dumps([module, names, args])]
        given = {**os.environ, "PYTHONUNBUFFERED": "1", **env}
        self._popen = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, env=given, cwd=ROOT)

    def end(self, deadline_s: float) -> Ended:
        """Wait until it has ended, or stop it at `deadline_s`."""
        try:
            status: int | None = self._popen.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._popen.send_signal(signal.SIGUSR1)  # prints every thread's stack
            time.sleep(0.5)
            self._popen.kill()
            self._popen.wait()
            status = None
        with self._output:
            self._output.seek(0)
            return Ended(self.rank, status, self._output.read())


def call(function: str, *args: Any, limit_s: float, num_devices: int = 2) -> Any:
    """What `function`, such as ``tests.accelerator.zoo:judge_cases``, returns in one process, which is not a rank."""
    module, name = function.split(":")
    ended = _Process(module, [name], args, env=environment(num_devices)).end(time.monotonic() + limit_s)
    assert ended.status == 0, f"{function}: {ended.describe()}"
    return ended.results[name]


def run(
    file: str, *names: str, num_ranks: int, limit_s: float, until_rank_0: bool = False, **variables: str
) -> list[Ended]:
    """Run the functions `names` of the module `file` on each rank, and return how each rank ended.

    `until_rank_0` stops the others when rank 0 has ended.
    """
    module = ".".join(Path(file).relative_to(ROOT).with_suffix("").parts)
    with tempfile.TemporaryDirectory() as folder:
        shared = {**environment(num_ranks), "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
        shared |= {"MEETING_FILE": f"{folder}/store", **variables}
        deadline_s = time.monotonic() + limit_s
        first, *others = [
            _Process(module, names, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, rank=rank)
            for rank in range(num_ranks)
        ]
        ended = [first.end(deadline_s)]
        return ended + [each.end(0.0 if until_rank_0 else deadline_s) for each in others]


def run_to_the_end(file: str, *names: str, num_ranks: int, limit_s: float, **variables: str) -> list[dict[str, Any]]:
    """As `run`, but fails with every rank's last lines unless all ended well; returns what the functions returned."""
    ended = run(file, *names, num_ranks=num_ranks, limit_s=limit_s, until_rank_0=False, **variables)
    assert all(one.status == 0 for one in ended), "\n".join(one.describe() for one in ended)
    return [one.results for one in ended]


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


def _main(module: str, names: Sequence[str], args: Sequence[Any]) -> None:
    faulthandler.register(signal.SIGUSR1)
    functions = importlib.import_module(module)
    for name in names:
        print(f"{name} begins", flush=True)
        print("\n" + RESULT + json.dumps([name, getattr(functions, name)(*args)]), flush=True)


if __name__ == "__main__":
    try:
        _main(*json.loads(sys.argv[1]))
    except BaseException:  # noqa: BLE001 - shown, and the process ends
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # without waiting for the others in a destructor
    sys.exit(0)
