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


def call(function: str, *args: Any, limit_s: float, num_devices: int = 2) -> Any:
    """What `function`, such as ``tests.accelerator.zoo:judge_cases``, returns in one process, which is not a rank."""
    module, name = function.split(":")
    (ended,) = _start(module, [name], args, [{}], env=environment(num_devices), limit_s=limit_s)
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
        env = {**environment(num_ranks), "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
        env |= {"MEETING_FILE": f"{folder}/store", **variables}
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
        return _start(module, names, (), own, env=env, limit_s=limit_s, until_rank_0=until_rank_0)


def _start(
    module: str,
    names: Sequence[str],
    args: Sequence[Any],
    own: Sequence[Mapping[str, str]],
    *,
    env: Mapping[str, str],
    limit_s: float,
    until_rank_0: bool = False,
) -> list[Ended]:
    """Fork a process for each of `own`, its variables, from one that has imported torch, which takes longest."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(number)) for number in range(len(own))]
        order: dict[str, Any] = {"module": module, "names": names, "args": args, "own": own, "folder": folder}
        order |= {"limit_s": limit_s, "until_rank_0": until_rank_0}
        command = [sys.executable, "-m", __spec__.name, json.dumps(order)]
        given = {**os.environ, "PYTHONUNBUFFERED": "1", **env}
        done = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        statuses = json.loads(done.stdout.splitlines()[-1])
        return [Ended(rank, status, outputs[rank].read_text()) for rank, status in enumerate(statuses)]


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


def _fork(env: Mapping[str, str], output: Path) -> int:
    """0 in the new process, which has the variables `env` and writes what it prints into `output`."""
    pid = os.fork()
    if pid == 0:
        os.environ.update(env)
        for fd in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    return pid


def _await(pids: Sequence[int], limit_s: float, until_rank_0: bool) -> list[int | None]:
    """How each has ended; None for those that were stopped at the limit, or when the first had ended."""
    deadline_s = time.monotonic() + limit_s
    ended: dict[int, int] = {}
    while len(ended) < len(pids) and time.monotonic() < deadline_s and not (until_rank_0 and pids[0] in ended):
        for pid in set(pids) - set(ended):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    late = [pid for pid in pids if pid not in ended]
    for pid in late:
        os.kill(pid, signal.SIGUSR1)  # prints every thread's stack
    time.sleep(0.5 if late else 0.0)
    for pid in late:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [ended.get(pid) for pid in pids]


def _main(order: Mapping[str, Any]) -> None:
    functions = importlib.import_module(order["module"])
    importlib.import_module("torch._dynamo")  # which DDP and optimizers import
    pids = []
    for number, env in enumerate(order["own"]):
        pids.append(_fork(env, Path(order["folder"], str(number))))
        if pids[-1] == 0:
            _call(functions, order["names"], order["args"])
            return
    print(json.dumps(_await(pids, order["limit_s"], order["until_rank_0"])), flush=True)


def _call(functions: Any, names: Sequence[str], args: Sequence[Any]) -> None:
    faulthandler.register(signal.SIGUSR1)
    for name in names:
        print(f"{name} begins", flush=True)
        print("\n" + RESULT + json.dumps([name, getattr(functions, name)(*args)]), flush=True)


if __name__ == "__main__":
    try:
        _main(json.loads(sys.argv[1]))
    except BaseException:  # noqa: BLE001 - shown, and the process ends
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # without waiting for the others in a destructor
    sys.exit(0)
