# SPDX-License-Identifier: Apache-2.0
"""Run a script on ranks of this node, as part of a job on one or several nodes. Imports torch only when ranks start."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ddpilot.environments.interpreter import collector_paused
from ddpilot.environments.private_files import scratch_folder
from ddpilot.launching.elastic.options import RunOptions, RunStoppedError, StopSignal, signals_raise
from ddpilot.launching.elastic.output_thread import OutputThread
from ddpilot.launching.elastic.target import CPP_LEVEL_VARIABLE, PreparedRun, prepare_run
from ddpilot.launching.observer import MakeObserver
from ddpilot.launching.system_limits import limits_explained


def run_script(options: RunOptions, make_observer: MakeObserver | None = None) -> None:
    """Run the script or module of `options` on this node's ranks, as ``ddpilot run`` does, until all have ended.

    `make_observer`: creates the observer of the ranks; None: nothing is watched. Raises LaunchError or RendezvousError
    before any rank starts if the options or the machine do not allow it. Raises RankError if a rank fails, and
    RunStoppedError after SIGINT or SIGTERM.
    """
    run_prepared(prepare_run(options, os.environ), make_observer)


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
            scratch_folder("ddpilot-run-") as folder,  # removed after the pipes are closed: descriptors may be short
            OutputThread(prepared.display) as screen,
            _quiet_torch(),
            signals_raise(options.signals),
        ):
            # Imports torch: everything that can be checked without it has been checked.
            with collector_paused():
                from ddpilot.launching.elastic.setup import run_assembled

            run_assembled(prepared, screen, folder, make_observer)
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
