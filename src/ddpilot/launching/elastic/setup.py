# SPDX-License-Identifier: Apache-2.0
"""Assemble and run torch elastic's agent with ddpilot's parts for one ``ddpilot run``. Imports torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError as TorchRendezvousError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ddpilot.errors import LaunchError, RankError, RendezvousError
from ddpilot.group.address import Result, WaitNotices, call_in_thread
from ddpilot.launching.elastic import rank_main
from ddpilot.launching.elastic.agent import Agent, PipedLogs
from ddpilot.launching.elastic.options import RunOptions, RunStoppedError, StopSignal
from ddpilot.launching.elastic.output_thread import OutputThread
from ddpilot.launching.elastic.rendezvous.node_state import NodeState
from ddpilot.launching.elastic.rendezvous.static_rendezvous import StaticRendezvousHandler
from ddpilot.launching.elastic.target import PreparedRun
from ddpilot.launching.observer import MakeObserver
from ddpilot.launching.rank_environment import EXIT_REQUEUE

_PAUSE_S = 0.1


def run_assembled(
    prepared: PreparedRun, screen: OutputThread, folder: Path, make_observer: MakeObserver | None
) -> None:
    """Run the ranks of this node to the end of the job. Raises the errors that `run_prepared` documents.

    `folder`: for the ranks' reports; `make_observer`: makes the observer of an attempt.
    """
    options, me, rendezvous = prepared.options, prepared.me, None
    if prepared.endpoint is not None:
        limits = {"timeout_s": options.rdzv_timeout_s, "node_timeout_s": options.node_timeout_s}
        rendezvous = StaticRendezvousHandler(prepared.endpoint, me, run_id=prepared.run_id, note=screen.note, **limits)
    handler = rendezvous or _torch_rendezvous(options, prepared.run_id, screen.note)
    logs = PipedLogs(options, screen, folder, prepared.variables, make_observer, rendezvous)
    agent = Agent(_worker_spec(options, me, handler), logs, options, screen, rendezvous)
    is_clean = False
    try:
        _run(agent, me, options)
        error = logs.observer.finish(screen.note)
        if error is not None:
            raise error
        is_clean = True
    except (LaunchError, RendezvousError, RunStoppedError) as error:
        if rendezvous is not None and agent.error is None:
            rendezvous.report_failure(error)
        raise
    finally:
        logs.end_observer(is_clean=is_clean)
        with contextlib.suppress(StopSignal, SignalException):  # a second signal: exit without leaving the rendezvous
            handler.shutdown()


def _worker_spec(options: RunOptions, me: NodeState, handler: RendezvousHandler) -> WorkerSpec:
    entrypoint, args = _command(options)
    return WorkerSpec(
        role=options.role,
        local_world_size=me.nproc_per_node,
        rdzv_handler=handler,
        entrypoint=entrypoint,
        args=args,
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval_s,
        local_addr=options.local_addr,
    )


def _run(agent: Agent, me: NodeState, options: RunOptions) -> None:
    did = f"running `{options.name}`"
    where = f"`{options.name}`" if me.nnodes == 1 else me.place
    try:
        result = agent.run()
    except SignalException as stop:
        found = f"{where} was stopped by {stop.sigval.name}: {agent.ranks.describe_ends()}"
        raise RunStoppedError(did, found=found, exitcode=EXIT_REQUEUE if agent.ranks.want_requeue else 1) from None
    except StopSignal as stop:
        found = f"{where} was stopped by {stop.number.name} before ranks were started"
        raise RunStoppedError(did, found=found, exitcode=128 + stop.number) from None
    except TorchRendezvousError as error:
        found = f"{type(error).__name__}: {error}".removesuffix(": ")
        if isinstance(error, RendezvousTimeoutError):
            found = f"not all of {options.nnodes[0]} nodes joined in time; torch does not report which are missing"
        fix = "Check --rdzv-endpoint, and that every node was started with the same --rdzv-id and --nnodes"
        raise RendezvousError(f"joining the {options.rdzv_backend} rendezvous", found=found, fix=fix) from error
    if agent.error is not None:
        _copy_report(agent.report)
        if agent.ranks.want_requeue and isinstance(agent.error, RankError) and agent.error.exitcode == EXIT_REQUEUE:
            found = f"every rank of {where} exited with code {EXIT_REQUEUE}: run the same command again to resume"
            raise RunStoppedError(did, found=found, exitcode=EXIT_REQUEUE)
        raise agent.error
    if result.state != WorkerState.SUCCEEDED:
        fix = "Set LOGLEVEL=INFO to see the log of torch's agent"
        raise LaunchError(did, found=f"torch's agent finished with state {result.state.name}", fix=fix)


def _copy_report(report: Path | None) -> None:
    """Copy the first failure's report to the file that the parent process asks for, as torchrun does for schedulers."""
    wanted = os.environ.get(rank_main.REPORT_VARIABLE)
    if wanted and report is not None:
        shutil.copyfile(report, wanted)


def _command(options: RunOptions) -> tuple[str, tuple[str, ...]]:
    if options.kind == "program":
        return options.target, options.args
    # -u: ranks' output is shown immediately, as under torchrun.
    program = ("-u", rank_main.__file__, str(os.getpid()), options.kind, options.target)
    return sys.executable, (*program, *options.args)


class _WaitingHandler:
    """A rendezvous handler of torch whose waits can be interrupted by signals and are explained by notices."""

    def __init__(self, handler: RendezvousHandler, options: RunOptions, note: Callable[[str], None]) -> None:
        self._handler = handler
        self._options = options
        self._note = note
        self._is_waiting = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the nodes of the next attempt."""
        self._is_waiting = True  # stays True if a signal interrupts: the thread still uses the connection
        info = _wait(self._handler.next_rendezvous, self._options, self._note)
        self._is_waiting = False
        return info

    def shutdown(self) -> bool:
        """Close the rendezvous for all nodes, as torchrun does at the end. False if it is still waiting for nodes."""
        return not self._is_waiting and self._handler.shutdown()


def _wait(call: Callable[[], Result], options: RunOptions, note: Callable[[str], None]) -> Result:
    """Return or raise what `call` does, in a thread: torch's C++ calls block signals and show no progress.

    If a signal handler raises, the thread is abandoned.
    """
    answer, notices = call_in_thread(call, "ddpilot-rendezvous"), WaitNotices(note)
    fewest = f"{options.nnodes[0]} node{'s' * (options.nnodes[0] > 1)}"
    where = f" at {options.rdzv_endpoint}" if options.rdzv_endpoint else ""
    while True:
        try:
            return answer.result(_PAUSE_S)
        except futures.TimeoutError:
            if answer.done():
                raise
        waited = f"for {notices.waited_s:.0f} s"
        notices.show_if_due(f"waiting for the {options.rdzv_backend} rendezvous of {fewest}{where}, {waited}")


def _torch_rendezvous(options: RunOptions, run_id: str, note: Callable[[str], None]) -> Any:
    parameters = RendezvousParameters(
        backend=options.rdzv_backend,
        endpoint=options.rdzv_endpoint,
        run_id=run_id,
        min_nodes=options.nnodes[0],
        max_nodes=options.nnodes[1],
        local_addr=options.local_addr,
        **{"timeout": str(int(options.rdzv_timeout_s)), **options.rdzv_conf},
    )
    try:
        return _WaitingHandler(_wait(lambda: get_rendezvous_handler(parameters), options, note), options, note)
    except ImportError as error:  # torch's etcd backends need an extra package
        fix = "Install it, `pip install python-etcd`, or use c10d, which needs none"
        raise RendezvousError(f"preparing the {options.rdzv_backend} rendezvous", found=str(error), fix=fix) from error
    except (ValueError, TorchRendezvousError) as error:
        fix = "Backends are static (ddpilot's own), c10d, etcd and etcd-v2; --rdzv-endpoint is host:port"
        raise RendezvousError(f"preparing the {options.rdzv_backend} rendezvous", found=str(error), fix=fix) from error
