# SPDX-License-Identifier: Apache-2.0
"""Check a run before its ranks start, without importing torch, and open the port of node 0."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpilot.errors import LaunchError, did_you_mean
from ddpilot.launching.elastic.options import RunOptions
from ddpilot.launching.elastic.rendezvous.network import Endpoint, open_endpoint, rank_network_variables
from ddpilot.launching.elastic.rendezvous.node_state import NodeState
from ddpilot.launching.elastic.target import check_stream, check_target
from ddpilot.launching.nproc import resolve_nproc
from ddpilot.launching.rank_environment import LAUNCH_VARIABLE, choose_num_threads
from ddpilot.output.writer import LabelledWriter

CPP_LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"
_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_BACKEND_ENTRIES = "torchrun.handlers"  # entry point group in which torch looks for other packages' backends


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A validated run, ready to start.

    `endpoint`: address of the store, None for a rendezvous backend of torch; `variables`: for the ranks' environment,
    in addition to torch's.
    """

    options: RunOptions
    me: NodeState
    run_id: str
    endpoint: Endpoint | None
    variables: Mapping[str, str]
    display: LabelledWriter


def prepare_run(options: RunOptions, environ: Mapping[str, str]) -> PreparedRun:
    """Check everything that can be wrong before ranks start, without importing torch; on node 0, open the port.

    Raises, in less than 3 s, LaunchError (missing script, syntax error, folder that is not writable, no GPU, unusable
    interface) and RendezvousError (a name that does not resolve, a port in use).
    """
    check_target(options.kind, options.target)
    _check_backend(options.rdzv_backend)
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


def _check_backend(name: str) -> None:
    """Raise LaunchError if torch has no rendezvous backend of that name, including those of installed packages."""
    known = [*_BACKENDS, *sorted(entry.name for entry in importlib.metadata.entry_points(group=_BACKEND_ENTRIES))]
    if name not in known:
        guess = did_you_mean(name, known, show=str)
        fix = f"{guess} Backends are {', '.join(known[:-1])} and {known[-1]}; static is ddpilot's".lstrip()
        raise LaunchError("reading --rdzv-backend", found=f"{name!r}", fix=fix)


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
