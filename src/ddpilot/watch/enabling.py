# SPDX-License-Identifier: Apache-2.0
"""Watch ranks that somebody else has started: torchrun, srun, mpirun. Each rank records, the first of a node has an
observer started, which is a process of its own and ends with the ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType

import psutil

from ddpilot.environments.detect import detect_topology
from ddpilot.environments.topology import Topology
from ddpilot.record.hook import HOOK, RING_DIR_VARIABLE
from ddpilot.record.on_import import when_imported
from ddpilot.watch.folders import jobs_root, open_root
from ddpilot.watch.options import OnFinding, WatchOptions
from ddpilot.watch.reaching import describe_way

WATCH_VARIABLE = "DDPILOT_WATCH"
"""1: ranks are watched without a word of their script's."""

GUARD_VARIABLE = "DDPILOT_GUARD"
ACTION_VARIABLE = "DDPILOT_ON_FINDING"
_OWNER_VARIABLE = "DDPILOT_WATCHED_PID"
GUARD_HOOK = "ddpilot.guard.hook:start"
_ABOUT_A_RANK = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_DETACH = "import os, sys\nif os.fork(): os._exit(0)\nimport runpy\nrunpy.run_module(sys.argv[1], run_name='__main__')"


def enable(
    *, guard: bool = True, on_finding: OnFinding = None, stall_warn_s: float = 30.0, name: str | None = None
) -> Path | None:
    """Record this rank's collectives from now on, and have the ranks of this node observed, until they end.

    To be called on every rank, early, by a script that torchrun, srun or mpirun has started; not collective. Returns
    the job's folder; None where nothing is to be done: in a process that is no rank, or one that is watched already.
    `guard`, `on_finding` ("stop" or "report"; None: "stop") and `stall_warn_s` as in `Launcher`: what the first rank of
    a node says counts. "stop" shows the report on stderr and sends SIGTERM to the ranks of this node. Raises
    LaunchError for a value that cannot be meant; whatever fails later is said in one line, and the script goes on.
    """
    options = WatchOptions(guard=guard, on_finding=on_finding, stall_warn_s=stall_warn_s)
    if os.environ.get(RING_DIR_VARIABLE) or os.environ.get(_OWNER_VARIABLE):
        return None
    topology = detect_topology(os.environ)
    if not topology.is_distributed:
        return None
    try:
        return _enable(options, topology, name or Path(sys.argv[0]).name or "python")
    except (OSError, psutil.Error) as error:
        sys.stderr.write(f"ddpilot: rank {topology.rank}: this job is not watched: {error}\n")
        return None


def enable_from_environment(environ: Mapping[str, str] = os.environ) -> None:
    """`enable`, where `WATCH_VARIABLE` is 1; whatever is wrong is said in one line."""
    if environ.get(WATCH_VARIABLE) != "1":
        return
    try:
        action = environ.get(ACTION_VARIABLE) or None
        enable(guard=environ.get(GUARD_VARIABLE) != "0", on_finding=action)  # type: ignore[arg-type]  # it checks that
    except Exception as error:  # noqa: BLE001 - said, and never in the way of training
        sys.stderr.write(f"ddpilot: {WATCH_VARIABLE}=1: this job is not watched: {error}\n")


def _enable(options: WatchOptions, topology: Topology, name: str) -> Path:
    folder = open_root(jobs_root()) / _job_id()
    folder.mkdir(mode=0o700, exist_ok=True)
    # What this rank starts, such as a DataLoader's worker, inherits its variables and is no rank.
    os.environ[_OWNER_VARIABLE] = str(os.getpid())
    _note_exceptions(folder / f"rank{topology.rank}.error")
    start = SimpleNamespace(rank=topology.rank, environ={**os.environ, RING_DIR_VARIABLE: str(folder)})
    hooks = (HOOK, GUARD_HOOK) if options.guard else (HOOK,)

    def begin(_torch: ModuleType) -> None:
        from ddpilot.group.works_end import let_works_end

        let_works_end()
        for hook in hooks:
            module, _, function = hook.partition(":")
            getattr(importlib.import_module(module), function)(start)

    when_imported("torch", "ddpilot.watch", begin)
    if topology.local_rank == 0:
        _start_observer(folder, options, topology, name)
    return folder


def _job_id() -> str:
    """The same for all ranks of a node: made of the process that started them, and of how often it has."""
    launcher = _find_launcher()
    began = time.strftime("%m%d-%H%M%S", time.localtime(launcher.create_time()))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{began}-{launcher.pid}" + (f"-{attempt}" if attempt != "0" else "")


def _find_launcher() -> psutil.Process:
    """The nearest ancestor that is not of this rank alone, as a shell script between it and its launcher is."""
    mine = {variable: os.environ.get(variable) for variable in _ABOUT_A_RANK}
    process = psutil.Process(os.getppid())
    while True:
        try:
            environ, parent = process.environ(), process.parent()
        except (psutil.Error, OSError):  # of another user: the launcher's
            return process
        if parent is None or {variable: environ.get(variable) for variable in _ABOUT_A_RANK} != mine:
            return process
        process = parent


def _start_observer(folder: Path, options: WatchOptions, topology: Topology, name: str) -> None:
    said = {
        "folder": str(folder),
        "name": name,
        "command": [sys.executable, *sys.argv],
        "world_size": topology.world_size,
        "local_world_size": topology.local_world_size,
        "rank_pid": os.getpid(),
        "on_finding": options.on_finding if isinstance(options.on_finding, str) else "stop",
        "stall_warn_s": options.stall_warn_s,
        "way": describe_way(topology, name, os.environ),
    }
    environ = {key: value for key, value in os.environ.items() if key not in (WATCH_VARIABLE, *_ABOUT_A_RANK)}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    # It is nobody's child in the end: the script's own may be all that it waits for.
    subprocess.run(
        [sys.executable, "-c", _DETACH, "ddpilot.watch.observing", json.dumps(said)],
        stdin=subprocess.DEVNULL,
        env=environ,
        start_new_session=True,
        check=True,
    )


def _note_exceptions(path: Path) -> None:
    theirs = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        try:
            import traceback

            text = "".join(traceback.format_exception(kind, error, frames))
            path.write_text(json.dumps([kind.__qualname__, str(error)[:10_000], text[-10_000:]]), encoding="utf-8")
        except Exception as fault:  # noqa: BLE001 - the user's exception matters more
            sys.stderr.write(f"ddpilot: what was raised could not be noted: {fault!r}\n")
        theirs(kind, error, frames)

    sys.excepthook = hook
