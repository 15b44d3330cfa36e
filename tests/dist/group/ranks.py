# SPDX-License-Identifier: Apache-2.0
"""Start real ranks for tests: processes forked from multiprocessing's fork server, which has imported torch.

Each rank writes to its own log; a run has a hard time limit, and a failure shows the last lines of every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.ports import bound_socket

_CONTEXT = multiprocessing.get_context("forkserver")
_LAST_LINES = 25


@dataclass(frozen=True)
class RankRun:
    """What became of the ranks, in rank order."""

    results: list[Any]
    """What the body returned, as JSON keeps it; None for a rank that did not return."""
    codes: list[int]
    """Exit codes; minus the signal's number for a killed rank."""
    logs: list[str]


RunRanks = Callable[..., RankRun]


@contextlib.contextmanager
def fork_server() -> Iterator[RunRanks]:
    """A process that imports torch once, with what the first DDP model imports, and forks the ranks of every job."""
    _CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.distributed", "pytest"])
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as config["tempdir"]:
        multiprocessing.forkserver.ensure_running()
        del config["tempdir"]
        try:
            run_ranks("entering.nothing", 1)  # when it has returned, everything is imported
            yield run_ranks
        finally:
            multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


def run_ranks(
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

    `agent`: a store hosted outside the ranks, as under a launcher; else rank 0 is to host it on a port that is free.
    Fails the test, with every rank's last lines, after `timeout_s` or (unless `may_fail`) on a nonzero exit code.
    """
    with tempfile.TemporaryDirectory() as folder, bound_socket() as keeper:
        store = _host_store(keeper.getsockname()[1], keeper) if agent else None
        common = {
            **os.environ,
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(keeper.getsockname()[1]),
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_USE_AGENT_STORE": str(agent),
        }
        parts = []
        for rank in range(world_size):
            found = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})}
            environ = {name: value for name, value in found.items() if value}
            parts.append((body, args, environ, Path(folder) / str(rank)))
        ranks = [_CONTEXT.Process(target=_be_rank, args=part) for part in parts]
        for each in ranks:
            each.start()
        end_s = time.monotonic() + timeout_s
        for each in ranks:
            each.join(max(0.0, end_s - time.monotonic()))
        late = any(each.is_alive() for each in ranks)
        codes = [_end(each) for each in ranks]
        del store
        run = RankRun(*_read(Path(folder), codes))
    wrong = [rank for rank, code in enumerate(codes) if code != 0]
    if late or (wrong and not may_fail):
        tails = ["\n".join(log.splitlines()[-_LAST_LINES:]) for log in run.logs]
        last = "\n".join(f"--- rank {rank} ({codes[rank]})\n{tail}" for rank, tail in enumerate(tails))
        why = f"not done in {timeout_s} s" if late else f"ranks {wrong} failed"
        pytest.fail(f"{body}: {why}\n{last}", pytrace=False)
    return run


def _host_store(port: int, keeper: Any) -> Any:
    from torch._C._distributed_c10d import TCPStore

    keeper.listen(64)
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=5),
        master_listen_fd=os.dup(keeper.fileno()),
        use_libuv=False,  # libuv's server takes no socket in torch 2.6
    )


def _end(process: Any) -> int:
    """Kill what is left of a rank's session, and return the rank's exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    code: int = process.exitcode
    process.close()
    return code


def _read(folder: Path, codes: list[int]) -> tuple[list[Any], list[int], list[str]]:
    results, logs = [], []
    for rank in range(len(codes)):
        result, log = (folder / f"{rank}.{kind}" for kind in ("json", "log"))
        results.append(json.loads(result.read_text()) if result.exists() else None)
        logs.append(log.read_text(errors="replace") if log.exists() else "")
    return results, codes, logs


def _be_rank(body: str, args: tuple[Any, ...], environ: dict[str, str], path: Path) -> None:
    os.setsid()
    gc.freeze()  # as a rank server does: a search for live models then passes over what torch has imported
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update({**environ, "TEST_RESULT": str(path.with_suffix(".json"))})
    faulthandler.enable()
    code = 1
    try:
        module, _, name = body.partition(".")
        call = getattr(importlib.import_module(f"tests.dist.group.bodies.{module}"), name)
        path.with_suffix(".json").write_text(json.dumps(call(*args)))
        code = 0
    except BaseException:  # noqa: BLE001  (printed into this rank's log; the exit code tells)
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
