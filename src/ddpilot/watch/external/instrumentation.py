# SPDX-License-Identifier: Apache-2.0
"""Watch ranks that torchrun, srun or mpirun started instead of ddpilot.

Each rank records its collectives. The first rank of a node starts an observer, a separate process that ends with the
ranks.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import NoReturn, get_args

import psutil

from ddpilot.environments.detect import detect_topology
from ddpilot.environments.interpreter import when_imported
from ddpilot.environments.private_files import check_own_folder, lock_file, open_own_file, write_own_text
from ddpilot.environments.topology import Topology
from ddpilot.environments.variables import read_switch, read_text
from ddpilot.errors import LaunchError, TopologyError
from ddpilot.guard.hook import GUARD_VARIABLE
from ddpilot.module_names import GUARD_HOOK, OBSERVER_PROCESS, RECORD_HOOK
from ddpilot.record.hook import RING_DIR_VARIABLE
from ddpilot.watch.external.rank_process import RankProcess, describe_connection, error_path, read_rank_process
from ddpilot.watch.job_folder import OBSERVER, jobs_root, locked, open_root
from ddpilot.watch.options import Action, WatchOptions

WATCH_VARIABLE = "DDPILOT_WATCH"
"""Switch: if it is on, ranks are watched without any change to their script."""

ACTION_VARIABLE = "DDPILOT_ON_FINDING"
"""The action of `WatchOptions`, "report" or "stop"."""

OWNER_VARIABLE = "DDPILOT_WATCHED_PID"
"""Set in the environment of a watched rank, for the processes that it starts: the rank's pid."""

_RANKS = ("RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_ABOUT_A_RANK = (*_RANKS, "LOCAL_RANK")
_ABOUT_A_JOB = (
    *("MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    *("SLURM_STEP_ID", "PMIX_NAMESPACE"),
)
_DETACH = (
    "import sys; sys.path[:] = filter(None, sys.path)\n"  # modules there may shadow standard ones
    "import os\nif os.fork(): os._exit(0)\nimport runpy\nrunpy.run_module(sys.argv[1], run_name='__main__')"
)
_enabled_pid = 0


def enable(
    *, guard: bool = True, on_finding: Action | None = None, stall_warn_s: float = 30.0, name: str | None = None
) -> Path | None:
    """Record this rank's collectives from now on, and have the ranks of this node observed until they end.

    Call it early on every rank of a script that torchrun, srun or mpirun has started; it is not collective. Returns the
    job's folder; None if there is nothing to do, that is, in a process that is not a rank or is watched already.
    `guard`, `on_finding` ("stop" or "report"; None: "stop") and `stall_warn_s` are as in `Launcher`; the values of the
    first rank of a node apply. "stop" prints the report on stderr and sends SIGTERM to the ranks of this node. `name`:
    the job's name in `ddpilot watch`; default: the script's. Raises LaunchError for an invalid value. Later failures
    are reported in one line, and the script continues.
    """
    action: object = on_finding
    if action not in (None, *get_args(Action)):
        what = f"{action!r}"
        if callable(action):
            what = f"a function, {what}: the observer is a process of its own and cannot call it"
        more = "; `Launcher` takes a function" * callable(action)
        raise LaunchError("reading `on_finding`", found=what, fix=f'Give "stop" or "report"{more}')
    options = WatchOptions(guard=guard, on_finding=on_finding, stall_warn_s=stall_warn_s)
    topology = detect_topology(os.environ)
    if not topology.is_distributed or _enabled_pid == os.getpid():
        return None
    try:
        origin = find_origin(os.environ)
        return None if origin is None else _enable(options, topology, str(name or Path(sys.argv[0]).name), origin)
    except (OSError, psutil.Error, subprocess.SubprocessError) as error:
        sys.stderr.write(f"ddpilot: rank {topology.rank}: this job is not watched: {error}\n")
        return None


def enable_from_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Call `enable` if the switch `WATCH_VARIABLE` is on; any error is reported in one line, and ranks continue.

    A value that is not understood is the same on every rank, and reported by rank 0 alone.
    """
    try:
        if not read_switch(environ, WATCH_VARIABLE):
            return
        guard, action = read_switch(environ, GUARD_VARIABLE), read_text(environ, ACTION_VARIABLE)
        if action not in (None, *get_args(Action)):
            fix = "Set it to report or stop, or unset it"
            raise TopologyError(f"reading {ACTION_VARIABLE}", found=repr(action), fix=fix, variable=ACTION_VARIABLE)
        enable(guard=guard is not False, on_finding=action)  # type: ignore[arg-type]  # checked above
    except Exception as error:  # noqa: BLE001 - reported; must not stop the training
        is_ours = getattr(error, "variable", None) in (WATCH_VARIABLE, GUARD_VARIABLE, ACTION_VARIABLE)
        if not is_ours or read_text(environ, *_RANKS) in (None, "0"):
            sys.stderr.write(f"ddpilot: this job is not watched: {error}\n")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The processes that started this rank."""

    launcher: psutil.Process
    """The nearest ancestor that does not belong to this rank alone."""
    shell: psutil.Process
    """The outermost process that belongs to this rank alone: this process, or the shell that started it."""


def find_origin(environ: Mapping[str, str]) -> Origin | None:
    """Return the origin of this rank; None in a process that a watched rank has started, such as a worker.

    A rank of a job that a watched rank has launched is a rank in its own right: its launcher is between the two.
    """
    this = psutil.Process()
    began_with = _environ(this) or {}
    # A forked rank sets its variables itself, and a script may add some; wrapper processes have neither.
    mine = began_with if any(name in began_with for name in _ABOUT_A_RANK) else environ
    line = [(each, _environ(each)) for each in this.parents()]
    if not line:
        return None
    num_below = _count_below_owner(line, environ)
    if num_below is None:
        below = line
    elif num_below >= 0:
        below = line[:num_below]
    else:
        return None
    at = _first_different(below, mine, _ABOUT_A_RANK)
    if at is None and num_below is not None:
        at = _first_different(below, mine, _ABOUT_A_JOB)
        if at is None:
            return None
    at = len(line) - 1 if at is None else at
    return Origin(launcher=line[at][0], shell=line[at - 1][0] if at else this)


_Line = list[tuple[psutil.Process, Mapping[str, str] | None]]


def _count_below_owner(line: _Line, environ: Mapping[str, str]) -> int | None:
    """Return the number of ancestors in `line` below the watched rank that started them; None if there is no such rank.

    -1 if this process is watched by its launcher, or descends from a watched rank that is no longer its ancestor.
    """
    owner = int(environ.get(OWNER_VARIABLE) or 0)
    folder = environ.get(RING_DIR_VARIABLE)
    with_folder = [
        at for at, (_, theirs) in enumerate(line) if folder and (theirs or {}).get(RING_DIR_VARIABLE) == folder
    ]
    found = [at for at, (process, _) in enumerate(line) if process.pid == owner]
    if folder and not with_folder:
        return -1
    found += with_folder[-1:]
    if not found:
        return None if owner in (0, os.getpid()) else -1
    return min(found)


def _first_different(line: _Line, mine: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Return the index of the first process in `line` whose variables `names` differ from `mine`; None if none do.

    A process whose environment cannot be read, as another user's, counts as different.
    """
    for at, (_, theirs) in enumerate(line):
        if theirs is None or any(theirs.get(name) != mine.get(name) for name in names):
            return at
    return None


def _environ(process: psutil.Process) -> Mapping[str, str] | None:
    """Return the initial environment of `process`; None if it belongs to a different user or has ended."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return None


def _enable(options: WatchOptions, topology: Topology, name: str, origin: Origin) -> Path | None:
    global _enabled_pid
    root = open_root(jobs_root())
    with locked(root):
        folder = _open_folder(root, origin.launcher)
        before = read_rank_process(folder, topology.rank)
        if before is not None and before.is_running and before.pid != os.getpid():
            return None  # a second process of this rank at the same time: the first one is the rank
        number = 0 if before is None else before.number + 1
        error_path(folder, topology.rank).unlink(missing_ok=True)
        _describe(options, topology, name, origin, number).write(folder, topology.rank)
        is_observed = topology.local_rank != 0 or _is_observed(folder)
    _note_exceptions(error_path(folder, topology.rank))
    start = SimpleNamespace(rank=topology.rank, environ={**os.environ, RING_DIR_VARIABLE: str(folder)})
    hooks = (RECORD_HOOK, GUARD_HOOK) if options.guard else (RECORD_HOOK,)

    def begin(_torch: ModuleType) -> None:
        from ddpilot.group.teardown import let_works_end

        let_works_end()
        for hook in hooks:
            module, _, function = hook.partition(":")
            recording = getattr(importlib.import_module(module), function)(start)
            if hook == RECORD_HOOK and recording is not None:
                _note_exit(recording.stop)

    when_imported("torch", "watch", begin)
    if not is_observed:
        _start_observer(folder)
    _enabled_pid = os.getpid()
    # Child processes of this rank, such as DataLoader workers, inherit its variables and are not ranks.
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    return folder


def _note_exit(stop: Callable[[], None]) -> None:
    """Call `stop` before `os._exit(0)` too: the observer does not see the exit status and would report a crash."""
    pid, theirs = os.getpid(), os._exit

    def leave(status: int) -> NoReturn:
        try:
            if status == 0 and os.getpid() == pid:  # forked workers of the rank exit this way
                stop()
        finally:
            theirs(status)

    os._exit = leave


def _open_folder(root: Path, launcher: psutil.Process) -> Path:
    """Return the job's folder, the same for all ranks that `launcher` has started on this node in this attempt."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    about = (platform.node(), _pid_namespace(), str(launcher.pid), _start_of(launcher), attempt)
    key = hashlib.blake2b("\n".join(about).encode(), digest_size=4).hexdigest()
    found = next(iter(sorted(root.glob(f"*-{key}"))), None)
    if found is not None:
        return check_own_folder(found)
    folder = root / f"{time.strftime('%m%d-%H%M%S')}-{key}"
    folder.mkdir(mode=0o700)
    return folder


def _start_of(process: psutil.Process) -> str:
    """Return the start time of `process`: on Linux in clock ticks since boot, which clock changes do not affect."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    return str(round(process.create_time()))


def _pid_namespace() -> str:
    """Return the pid namespace: a container has its own pids, and may share a folder with others."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _describe(options: WatchOptions, topology: Topology, name: str, origin: Origin, number: int) -> RankProcess:
    this = psutil.Process()
    return RankProcess(
        pid=this.pid,
        started_s=this.create_time(),
        shell_pid=origin.shell.pid,
        shell_started_s=origin.shell.create_time(),
        since_ns=time.monotonic_ns(),
        number=number,
        job={
            "name": name or "python",
            "command": [sys.executable, *sys.argv],
            "world_size": topology.world_size,
            "local_world_size": topology.local_world_size,
            "local_rank": topology.local_rank,
            "on_finding": options.on_finding or "stop",
            "stall_warn_s": options.stall_warn_s,
            "connection": describe_connection(topology, name, os.environ),
        },
    )


def _is_observed(folder: Path) -> bool:
    """True if an observer runs for `folder`; it will see this process too."""
    fd = open_own_file(folder / OBSERVER, os.O_RDWR | os.O_CREAT)
    try:
        return not lock_file(fd, wait=False)
    finally:
        os.close(fd)


def _start_observer(folder: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if key not in (WATCH_VARIABLE, *_ABOUT_A_RANK)}
    environ["PYTHONPATH"] = os.pathsep.join(str(path) for path in sys.path if str(path))
    # The observer detaches itself: the script may wait for all of its child processes.
    subprocess.run(
        [sys.executable, "-c", _DETACH, OBSERVER_PROCESS, str(folder)],
        stdin=subprocess.DEVNULL,
        env=environ,
        start_new_session=True,
        check=True,
    )


def _note_exceptions(path: Path) -> None:
    theirs, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        try:
            if os.getpid() == pid:  # not in a forked child of the rank
                import traceback

                text = "".join(traceback.format_exception(kind, error, frames))
                write_own_text(path, json.dumps([kind.__qualname__, str(error)[:10_000], text[-10_000:]]))
        except Exception as fault:  # noqa: BLE001 - the user's exception matters more
            sys.stderr.write(f"ddpilot: the exception could not be recorded: {fault!r}\n")
        theirs(kind, error, frames)

    sys.excepthook = hook
