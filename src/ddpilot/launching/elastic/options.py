# SPDX-License-Identifier: Apache-2.0
"""Options of ``ddpilot run``, validated on construction, and the signals that a run handles."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

from ddpilot.errors import LaunchError
from ddpilot.launching.options import is_nproc

DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""Signals that are passed on to the ranks: torchrun's, and the one that Slurm can send (`--signal=USR1@120`)."""

# torch's agent reads the signals to handle from this variable when it starts ranks.
_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class StopSignal(BaseException):
    """A signal arrived before torch's agent had ranks to pass it on to."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        super().__init__(number.name)


class RunStoppedError(LaunchError):
    """A signal ended the run. `exitcode`: as torchrun's: 1 if ranks were running, 128 + the signal's number if not.

    75 if all ranks have saved a checkpoint and ask to be requeued.
    """

    def __init__(self, did: str, *, found: str, exitcode: int) -> None:
        self.exitcode = exitcode
        super().__init__(did, found=found)


class OutputClosedError(RunStoppedError):
    """The reader of the ranks' output has exited, as after `| head`. The run ends without a long report."""


@contextmanager
def signals_raise(names: Sequence[str]) -> Iterator[None]:
    """Make the signals `names` raise `StopSignal` until torch's agent handles them; restore all handlers on exit."""
    numbers = [signal.Signals[name] for name in names]
    # SIGCHLD too: if a parent process ignored it, which is inherited, exit codes of ranks could not be read.
    before = {number: signal.getsignal(number) for number in (*numbers, signal.SIGCHLD)}
    variable = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = ",".join(names)
    is_main = threading.current_thread() is threading.main_thread()
    try:
        for number in before if is_main else ():
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else _raise)
        yield
    finally:
        for number, handler in before.items() if is_main else ():
            signal.signal(number, handler)
        if variable is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = variable


def check_signals(names: Sequence[str]) -> None:
    """Raise LaunchError for a name that is not a signal or that cannot be handled."""
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            fix = "Give names that can be handled, such as SIGTERM,SIGINT,SIGUSR1"
            raise LaunchError("reading --signals-to-handle", found=f"{name!r}", fix=fix)


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    raise StopSignal(signal.Signals(number))


TargetKind = Literal["script", "module", "program"]
DEFAULT_PORT = 29500
"""Default port of the store; the same as torchrun's."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of one run of a script on this node. Raises LaunchError for an invalid value."""

    target: str
    """Path of the script, or of a directory or zip file with a `__main__.py`; module name; or program."""

    kind: TargetKind = "script"
    """Kind of `target`: a Python script, a module to run as with `python -m`, or any program."""

    args: tuple[str, ...] = ()
    """Arguments of the script. torch's agent replaces "${local_rank}" in them."""

    nproc_per_node: int | str = "auto"
    """Ranks on this node. "auto": one per visible accelerator, else 1; "gpu": one per visible accelerator, an error if
    there is none; "cpu": one per core that this process may use."""

    nnodes: tuple[int, int] = (1, 1)
    """Minimum and maximum number of nodes. They may differ only with a rendezvous backend of torch ("c10d")."""

    node_rank: int = 0
    """Rank of this node, 0 to nnodes - 1. Node 0 hosts the store at `master_addr`:`master_port`."""

    master_addr: str | None = None
    """Name or address of node 0. None: loopback on one node; required on several."""

    master_port: int | None = None
    """TCP port on node 0. None: a free port on one node, 29500 on several."""

    local_addr: str | None = None
    """Address of this node for the other nodes, with torch's backends. None: determined by torch."""

    rdzv_backend: str = "static"
    """How nodes find each other: "static" is ddpilot's own, by node rank; "c10d", "etcd-v2", ... are torch's."""

    rdzv_endpoint: str = ""
    """host:port for torch's rendezvous backends; with "static", an alternative to `master_addr` and `master_port`."""

    rdzv_id: str = "none"
    """Id of the job, the same on every node."""

    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    """Further settings for torch's rendezvous backends."""

    rdzv_timeout_s: float = 900.0
    """Seconds that nodes wait for each other at the start and at each restart."""

    node_timeout_s: float = 30.0
    """Seconds without a heartbeat from another node after which this node terminates its ranks."""

    max_restarts: int = 0
    """Maximum number of times that all ranks are restarted after a failure."""

    monitor_interval_s: float = 0.1
    """Seconds between two polls of the ranks."""

    shutdown_timeout_s: float = 30.0
    """Seconds that ranks have after a signal to `ddpilot run`, for instance to save a checkpoint, before SIGKILL."""

    signals: tuple[str, ...] = DEFAULT_SIGNALS
    """Signals that are passed on to the ranks, which then have `shutdown_timeout_s` to exit."""

    role: str = "default"
    """Role name of these ranks, passed to them as ROLE_NAME."""

    log_dir: Path | None = None
    """Folder for the files of `redirects` and `tee`; given alone, it implies tee of both streams."""

    redirects: str = "0"
    """Streams written to files instead of the screen, in torchrun's syntax: "3", "0:1,1:2"."""

    tee: str = "0"
    """Streams written to files and to the screen, in the same syntax."""

    shown_local_ranks: frozenset[int] | None = None
    """Local ranks whose output is shown; None: all."""

    def __post_init__(self) -> None:
        if not is_nproc(self.nproc_per_node):
            raise _refusal(
                "--nproc-per-node", self.nproc_per_node, "Give a number of ranks from 1 to 1024, or auto, gpu or cpu"
            )
        fewest, most = self.nnodes
        if not 1 <= fewest <= most:
            raise _refusal("--nnodes", f"{fewest}:{most}", "Give a number of nodes, or MIN:MAX with 1 <= MIN <= MAX")
        if self.is_static and fewest != most:
            fix = "With the static rendezvous give one number; a range needs --rdzv-backend c10d"
            raise _refusal("--nnodes", f"{fewest}:{most}", fix)
        if self.is_static and not 0 <= self.node_rank < most:
            fix = f"Nodes count from 0: with --nnodes {most} the last is {most - 1}"
            raise _refusal("--node-rank", self.node_rank, fix)
        if self.master_port is not None and not 0 <= self.master_port <= 65535:
            raise _refusal("--master-port", self.master_port, "Give a port from 1 to 65535")
        if self.max_restarts < 0:
            raise _refusal("--max-restarts", self.max_restarts, "Give 0 or more")
        for name, seconds in (
            ("--rdzv-timeout", self.rdzv_timeout_s),
            ("--node-timeout", self.node_timeout_s),
            ("--monitor-interval", self.monitor_interval_s),
            ("--shutdown-timeout", self.shutdown_timeout_s),
        ):
            if not 0 < seconds < 1e9:
                raise _refusal(name, f"{seconds:g}", "Give seconds, more than 0")

    @property
    def is_static(self) -> bool:
        """True if nodes use ddpilot's own rendezvous."""
        return self.rdzv_backend == "static"

    @property
    def name(self) -> str:
        """Name of the target in messages."""
        return f"-m {self.target}" if self.kind == "module" else Path(self.target).name or self.target


def _refusal(option: str, value: object, fix: str) -> LaunchError:
    return LaunchError(f"reading {option}", found=f"{value!r}", fix=fix)
