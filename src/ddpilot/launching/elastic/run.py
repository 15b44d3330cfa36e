# SPDX-License-Identifier: Apache-2.0
"""Run a script on ranks of this node, as part of a job on one or several nodes. Imports torch only when ranks start."""

from __future__ import annotations

import logging
import os
import platform
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddpilot.environments.private_files import scratch_folder
from ddpilot.errors import LaunchError
from ddpilot.launching.elastic.options import RunOptions
from ddpilot.launching.elastic.output_thread import OutputThread
from ddpilot.launching.elastic.rendezvous.network import Endpoint, open_endpoint, rank_network_variables
from ddpilot.launching.elastic.rendezvous.node_state import NodeState
from ddpilot.launching.elastic.rendezvous.torch_backends import check_backend
from ddpilot.launching.elastic.signals import RunStoppedError, StopSignal, signals_raise
from ddpilot.launching.elastic.target import check_stream, check_target
from ddpilot.launching.nproc import resolve_nproc
from ddpilot.launching.observer import MakeObserver
from ddpilot.launching.rank_environment import LAUNCH_VARIABLE, choose_num_threads
from ddpilot.launching.system_limits import limits_explained
from ddpilot.output.writer import LabelledWriter

CPP_LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A validated run, ready to start. `variables`: for the ranks' environment, in addition to torch's."""

    options: RunOptions
    me: NodeState
    run_id: str
    endpoint: Endpoint | None
    variables: Mapping[str, str]
    display: LabelledWriter


def run_script(options: RunOptions, make_observer: MakeObserver | None = None) -> None:
    """Run the script or module of `options` on this node's ranks, as ``ddpilot run`` does, and return once all ended.

    `make_observer`: creates the observer of the ranks; without it, nothing is watched. Raises LaunchError or
    RendezvousError before any rank starts if the options or the machine do not allow it, RankError if a rank fails, and
    RunStoppedError after SIGINT or SIGTERM.
    """
    run_prepared(prepare_run(options, os.environ), make_observer)


def prepare_run(options: RunOptions, environ: Mapping[str, str]) -> PreparedRun:
    """Check everything that can be wrong before ranks start, without importing torch; on node 0, open the port.

    Raises, in less than 3 s, LaunchError (missing script, syntax error, folder that is not writable, no GPU, unusable
    interface) and RendezvousError (a name that does not resolve, a port in use).
    """
    check_target(options.kind, options.target)
    check_backend(options.rdzv_backend)
    if options.log_dir is not None:
        _check_log_dir(options.log_dir)
    display = LabelledWriter("labelled", None)
    notes: list[str] = []
    count = resolve_nproc(options.nproc_per_node, environ, notes.append, write="-n {}".format)
    if options.kind == "script":
        check_stream(options.target, count, options.max_restarts)
    _check_filter(options, count, notes.append)
    one_node = options.is_static and options.nnodes[1] == 1
    run_id = uuid.uuid4().hex if one_node else options.rdzv_id
    variables = {
        LAUNCH_VARIABLE: run_id,
        "OMP_NUM_THREADS": str(choose_num_threads(environ, count)),
        CPP_LEVEL_VARIABLE: environ.get(CPP_LEVEL_VARIABLE, "WARNING"),  # torch's default, not this process's
    }
    endpoint = open_endpoint(options) if options.is_static else None
    if endpoint is not None:
        try:
            variables |= rank_network_variables(options, endpoint, environ, display.note)
        except BaseException:
            endpoint.close()
            raise
    for note in notes:  # shown only if no error about something else was raised
        display.note(note)
    me = NodeState(
        node_rank=options.node_rank,
        host=platform.node(),
        pid=os.getpid(),
        nnodes=options.nnodes[1],
        nproc_per_node=count,
        target=options.name,
        max_restarts=options.max_restarts,
    )
    return PreparedRun(options=options, me=me, run_id=run_id, endpoint=endpoint, variables=variables, display=display)


def _check_filter(options: RunOptions, count: int, note: Callable[[str], None]) -> None:
    """Raise LaunchError if --local-ranks-filter names a rank that the only node does not have."""
    wanted = options.shown_local_ranks
    if wanted is None or max(wanted) < count:
        return
    given = ",".join(map(str, sorted(wanted)))
    has = f"local rank{'s' * (count > 1)} 0{f' to {count - 1}' * (count > 1)}"
    if options.nnodes[1] == 1:
        fix = "Give local ranks of this node; they count from 0"
        raise LaunchError("reading --local-ranks-filter", found=f"{given}, but the node has {has}", fix=fix)
    if min(wanted) >= count:  # nodes may have different numbers of ranks
        note(f"--local-ranks-filter {given}: this node has {has}, so none of its output is shown")


def _check_log_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LaunchError(
            f"making files in --log-dir {folder}",
            found=f"{type(error).__name__}: {error.strerror or error}",
            fix="Give a folder that can be made and written to",
        ) from error


def run_prepared(prepared: PreparedRun, make_observer: MakeObserver | None = None) -> None:
    """Run the ranks of this node to the end of the job. Imports torch. `make_observer`: for each attempt.

    Raises RankError for the earliest failure on any node, RendezvousError for a node that never joined or was lost,
    WatchError for an observer's finding, RunStoppedError if a signal ended the run, and LaunchError otherwise. No
    process of this node remains afterwards. Must be called in the main thread, which receives signals.
    """
    options = prepared.options
    try:
        with (
            limits_explained(f"running `{options.name}` on {prepared.me.nproc_per_node} ranks"),
            OutputThread(prepared.display) as screen,
            scratch_folder("ddpilot-run-") as folder,
            _quiet_torch(),
            signals_raise(options.signals),
        ):
            # Imports torch: everything that can be checked without it has been checked.
            from ddpilot.launching.elastic.setup import run_assembled

            run_assembled(
                options,
                prepared.me,
                prepared.run_id,
                prepared.endpoint,
                screen,
                folder,
                prepared.variables,
                make_observer,
            )
    except StopSignal as stop:
        number = stop.number
        found = f"`{options.name}` was stopped by {number.name} before ranks were started"
        raise RunStoppedError(f"running `{options.name}`", found=found, exitcode=128 + number) from None
    finally:
        if prepared.endpoint is not None:
            prepared.endpoint.close()


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Suppress what torch's agent and store log about failures and signals, which ddpilot reports itself.

    Nothing is suppressed if the user has set LOGLEVEL or TORCH_CPP_LOG_LEVEL, respectively.
    """
    logger = logging.getLogger("torch.distributed.elastic")
    nothing, propagate = logging.NullHandler(), logger.propagate
    if "LOGLEVEL" not in os.environ:
        logger.addHandler(nothing)
        logger.propagate = False
    is_set = CPP_LEVEL_VARIABLE in os.environ
    os.environ.setdefault(CPP_LEVEL_VARIABLE, "ERROR")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[CPP_LEVEL_VARIABLE]
        logger.removeHandler(nothing)
        logger.propagate = propagate
