# SPDX-License-Identifier: Apache-2.0
"""Start real ranks for tests: processes forked from one that has imported torch and used nothing of it.

Each rank writes to its own log; a run has a hard time limit, and a failure shows the last lines of every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ports import bound_socket

_ROOT = Path(__file__).parents[3]
_LAST_LINES = 25
_IDLE_S = 30.0


@dataclass(frozen=True)
class RankRun:
    """What became of the ranks, in rank order."""

    results: list[Any]
    """What the body returned, as JSON keeps it; None for a rank that did not return."""
    codes: list[int]
    """Exit codes; minus the signal's number for a killed rank."""
    logs: list[str]


class RunRanks:
    """Runs bodies on ranks that are forked, job by job, from the process behind `lines`, which has imported torch."""

    def __init__(self, lines: subprocess.Popen[str]) -> None:
        self._lines = lines

    def __call__(
        self,
        body: str,
        world_size: int,
        *,
        agent: bool = True,
        env: Mapping[str, str] | None = None,
        args: tuple[Any, ...] = (),
        timeout_s: float = 60.0,
        may_fail: bool = False,
    ) -> RankRun:
        """Run `body(*args)` ("entering.seeded" of the folder bodies) on ranks that find torchrun's variables.

        `agent`: a store hosted outside the ranks, as under a launcher; else rank 0 is to host it on a port that is
        free. Fails the test, with every rank's last lines, after `timeout_s` or (unless `may_fail`) on a nonzero exit
        code.
        """
        with tempfile.TemporaryDirectory() as folder:
            job = {"body": body, "world_size": world_size, "agent": agent, "env": dict(env or {}), "args": args}
            late = not self._run({"job": job, "folder": folder, "environ": dict(os.environ)}, timeout_s)
            run = _read(Path(folder), world_size)
        wrong = [rank for rank, code in enumerate(run.codes) if code != 0]
        if late or (wrong and not may_fail):
            last = "\n".join(f"--- rank {rank} ({run.codes[rank]})\n{_tail(log)}" for rank, log in enumerate(run.logs))
            pytest.fail(
                f"{body}: {f'not done in {timeout_s} s' if late else f'ranks {wrong} failed'}\n{last}", pytrace=False
            )
        return run

    def _run(self, order: dict[str, Any], timeout_s: float) -> bool:
        """Whether the job ended in time; whatever is left of it is killed."""
        assert self._lines.stdin is not None
        assert self._lines.stdout is not None
        self._lines.stdin.write(json.dumps(order) + "\n")
        self._lines.stdin.flush()
        pid = int(self._lines.stdout.readline())  # once it leads a session of its own
        is_over, _, _ = select.select([self._lines.stdout], [], [], timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._lines.stdout.readline()
        _wait_until_idle(self._lines.pid)
        return bool(is_over)


@contextlib.contextmanager
def starter() -> Iterator[RunRanks]:
    """A process that imports torch once, uses nothing of it, and forks the ranks of every job."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.dist.group.ranks"],
        cwd=_ROOT,
        text=True,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as lines:
        try:
            assert lines.stdout is not None
            assert lines.stdout.readline() == "ready\n"
            _wait_until_idle(lines.pid)
            yield RunRanks(lines)
        finally:
            lines.kill()


def _wait_until_idle(pid: int) -> None:
    """Wait until the process waits for its next job, so that checks for leaks find no difference."""
    deadline_s = time.monotonic() + _IDLE_S
    while psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline_s, f"the process that forks ranks was not idle in {_IDLE_S} s"
        time.sleep(0.001)


def _tail(log: str) -> str:
    return "\n".join(log.splitlines()[-_LAST_LINES:])


def _read(folder: Path, world_size: int) -> RankRun:
    results, codes, logs = [], [], []
    for rank in range(world_size):
        result, code, log = (folder / f"{rank}.{kind}" for kind in ("json", "code", "log"))
        results.append(json.loads(result.read_text()) if result.exists() else None)
        codes.append(int(code.read_text()) if code.exists() else -signal.SIGKILL)
        logs.append(log.read_text(errors="replace") if log.exists() else "")
    return RankRun(results, codes, logs)


def _serve() -> None:
    """Fork each job of stdin in turn; write its pid and, when it has exited, a second line."""
    import torch._dynamo  # what the first DDP model or optimizer of a process imports
    import torch.distributed  # noqa: F401

    gc.freeze()  # so that collecting garbage in a rank does not copy all of torch's pages
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if (pid := os.fork()) == 0:
            _be_job(order)
        os.waitpid(pid, 0)
        print("over", flush=True)


def _be_job(order: dict[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        print(os.getpid(), flush=True)
        os.dup2(2, 1)
        os.environ.clear()
        os.environ.update(order["environ"])
        _main(order["job"], Path(order["folder"]))
        code = 0
    except BaseException:  # noqa: BLE001  (printed; the test misses what the ranks were to write)
        traceback.print_exc()
    os._exit(code)


def _main(job: dict[str, Any], folder: Path) -> None:
    from torch._C._distributed_c10d import TCPStore

    module, _, name = job["body"].partition(".")
    body = getattr(importlib.import_module(f"tests.dist.group.bodies.{module}"), name)
    keeper = bound_socket()
    port = keeper.getsockname()[1]
    if job["agent"]:
        keeper.listen(64)
    pids = {}
    for rank in range(job["world_size"]):
        if (pid := os.fork()) == 0:
            keeper.close()
            _be_rank(body, job, rank, port, folder)
        pids[pid] = rank
    store: TCPStore | None = None
    if job["agent"]:
        # Not libuv's server, which takes no socket in torch 2.6.
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=5),
            master_listen_fd=keeper.detach(),
            use_libuv=False,
        )
    while pids:
        pid, status = os.wait()
        (folder / f"{pids.pop(pid)}.code").write_text(str(os.waitstatus_to_exitcode(status)))
    del store


def _be_rank(body: Callable[..., Any], job: dict[str, Any], rank: int, port: int, folder: Path) -> None:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sizes = {"WORLD_SIZE": job["world_size"], "LOCAL_WORLD_SIZE": job["world_size"], "GROUP_RANK": 0}
    found = {"RANK": rank, "LOCAL_RANK": rank, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    found["TEST_RESULT"] = folder / f"{rank}.json"
    os.environ.update({name: str(value) for name, value in found.items()})
    os.environ.update(
        {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": str(job["agent"])}
    )
    os.environ.update({name: value for name, value in job["env"].items() if value})
    for name in [name for name, value in job["env"].items() if not value]:
        os.environ.pop(name, None)
    faulthandler.enable()
    code = 1
    try:
        result = body(*job["args"])
        (folder / f"{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:  # noqa: BLE001  (printed into this rank's log; the exit code tells)
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
