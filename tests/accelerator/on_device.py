# SPDX-License-Identifier: Apache-2.0
"""Call functions of the tests in processes that have the emulated accelerator: in one, or on ranks.

They are forked from one process that has imported torch, which takes longest: started as a program, this module forks
one that forks the others, for each line on its standard input. Each of those calls what it is given, one after the
other, and prints a line for each that returned. Arguments and results have to be JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
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
    """What `function`, such as ``tests.accelerator.zoo:judge_all``, returns in one process, which is not a rank."""
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
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(number)) for number in range(len(own))]
        order: dict[str, Any] = {"module": module, "names": names, "args": args, "own": own, "folder": folder}
        order |= {"limit_s": limit_s, "until_rank_0": until_rank_0}
        order["env"] = {**os.environ, "PYTHONUNBUFFERED": "1", **env}
        statuses = _Forker.take().fork(order)
        assert statuses is not None, "\n".join(path.read_text() for path in Path(folder).iterdir())
        return [Ended(rank, status, outputs[rank].read_text()) for rank, status in enumerate(statuses)]


class _Forker:
    """The process that has imported torch. `fork` returns how the processes of an order ended, None if none began."""

    _one: _Forker | None = None

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", __spec__.name]
            env = {**os.environ, "PYTHONUNBUFFERED": "1", **environment()}
            self._process = subprocess.Popen(command, env=env, cwd=ROOT, stdin=theirs.fileno(), stdout=theirs.fileno())
        self._socket = ours
        self.pid = self._process.pid

    @classmethod
    def take(cls) -> _Forker:
        """The one of this process, started at first use."""
        cls._one = cls._one or cls()
        return cls._one

    def fork(self, order: Mapping[str, Any]) -> list[int | None] | None:
        try:
            with self._socket.makefile("rw") as file:
                file.write(json.dumps(order) + "\n")
                file.flush()
                answer = file.readline()
        except BaseException:  # the test's time is over
            self.stop()
            raise
        found: list[int | None] | None = json.loads(answer or "null")
        return found

    def stop(self) -> None:
        _Forker._one = None
        self._socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def forker_pids() -> tuple[int, ...]:
    """The process that stays between tests, on purpose."""
    return (_Forker._one.pid,) if _Forker._one else ()


def stop_forker() -> None:
    """Stop it."""
    if _Forker._one:
        _Forker._one.stop()


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


def _main() -> None:
    importlib.import_module("torch._dynamo")  # which DDP and optimizers import
    # What was imported stays: without this, every process that is forked takes 0.8 s more to end.
    gc.collect()
    gc.freeze()

    for line in sys.stdin:
        order = json.loads(line)
        answer = Path(order["folder"], "statuses")
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(Path(order["folder"], "errors"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            os.dup2(2, 1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if _order(order, answer):
                return
            os._exit(0)  # it has run nothing of a test
        os.waitpid(pid, 0)
        print(answer.read_text() if answer.exists() else "null", flush=True)


def _order(order: Mapping[str, Any], answer: Path) -> bool:
    """Fork the processes of the order and write how they ended; whether this is one of them, at its end."""
    import torch

    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    functions = importlib.import_module(order["module"])
    pids = []
    for number, env in enumerate(order["own"]):
        pids.append(_fork(env, Path(order["folder"], str(number))))
        if pids[-1] == 0:
            _call(functions, order["names"], order["args"])
            return True
    answer.write_text(json.dumps(_await(pids, order["limit_s"], order["until_rank_0"])))
    return False


def _call(functions: Any, names: Sequence[str], args: Sequence[Any]) -> None:
    import torch

    # After a fork, the first call in a process makes the thread pool anew; the threads of a backward pass would race.
    torch.set_num_threads(torch.get_num_threads())
    faulthandler.register(signal.SIGUSR1)
    for name in names:
        print(f"{name} begins", flush=True)
        print("\n" + RESULT + json.dumps([name, getattr(functions, name)(*args)]), flush=True)


if __name__ == "__main__":
    try:
        _main()
    except BaseException:  # noqa: BLE001 - shown, and the process ends
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # without waiting for the others in a destructor
    sys.exit(0)
