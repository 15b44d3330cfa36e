# SPDX-License-Identifier: Apache-2.0
"""torch elastic's parts and ours, put together for one run."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError as TorchRendezvousError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ddpilot.errors import LaunchError, RendezvousError
from ddpilot.launching.elastic import worker_main
from ddpilot.launching.elastic.agent import Agent
from ddpilot.launching.elastic.logs import PipedLogs
from ddpilot.launching.elastic.meeting import Meeting
from ddpilot.launching.elastic.network import Endpoint
from ddpilot.launching.elastic.nodes import NodeState
from ddpilot.launching.elastic.options import RunOptions
from ddpilot.launching.elastic.screen import Screen
from ddpilot.launching.elastic.stopping import RunStoppedError, StopSignal


def run_assembled(
    options: RunOptions,
    me: NodeState,
    run_id: str,
    endpoint: Endpoint | None,
    screen: Screen,
    folder: Path,
    variables: Mapping[str, str],
) -> None:
    """Run the ranks of this node to the end of the job. Raises what `run_script` says.

    `endpoint`: where nodes meet, None for a rendezvous of torch's; `folder`: for the ranks' reports; `variables`: for
    the ranks' environment, on top of torch's.
    """
    meeting = None
    handler: RendezvousHandler
    if endpoint is None:
        handler = _torchs_rendezvous(options, run_id)
    else:
        handler = meeting = Meeting(
            endpoint,
            me,
            run_id=run_id,
            timeout_s=options.rdzv_timeout_s,
            node_timeout_s=options.node_timeout_s,
            say=screen.note,
        )
    entrypoint, args = _command(options)
    spec = WorkerSpec(
        role=options.role,
        local_world_size=me.nproc_per_node,
        rdzv_handler=handler,
        entrypoint=entrypoint,
        args=args,
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval_s,
        local_addr=options.local_addr,
    )
    agent = Agent(spec, PipedLogs(options, screen, folder, variables), options, screen, meeting)
    try:
        _run(agent, me, options)
    except (LaunchError, RendezvousError, RunStoppedError) as error:
        if meeting is not None and agent.error is None:
            meeting.tell_failure(error)
        raise
    finally:
        with contextlib.suppress(StopSignal, SignalException):  # an impatient second signal: leave without goodbyes
            handler.shutdown()


def _run(agent: Agent, me: NodeState, options: RunOptions) -> None:
    did = f"running `{options.name}`"
    who = f"`{options.name}`" if me.nnodes == 1 else me.place
    try:
        result = agent.run()
    except SignalException as stop:
        found = f"{who} was stopped by {stop.sigval.name}: {agent.ends}"
        raise RunStoppedError(did, found=found, exitcode=1) from None
    except StopSignal as stop:
        found = f"{who} was stopped by {stop.number.name} before there were ranks"
        raise RunStoppedError(did, found=found, exitcode=128 + stop.number) from None
    except TorchRendezvousError as error:
        found = f"{type(error).__name__}: {error}"
        fix = "Look at --rdzv-endpoint, and whether every node was started with the same --rdzv-id and --nnodes"
        raise RendezvousError(f"meeting by {options.rdzv_backend}", found=found, fix=fix) from error
    if agent.error is not None:
        _hand_up(agent.report)
        raise agent.error
    if result.state != WorkerState.SUCCEEDED:
        fix = "LOGLEVEL=INFO shows what torch's agent says"
        raise LaunchError(did, found=f"torch's agent ended with {result.state.name}", fix=fix)


def _hand_up(report: Path | None) -> None:
    """Give the first failure to who started this agent and asks for it, as torchrun does: schedulers read it."""
    wanted = os.environ.get(worker_main.REPORT_VARIABLE)
    if wanted and report is not None:
        shutil.copyfile(report, wanted)


def _command(options: RunOptions) -> tuple[str, tuple[str, ...]]:
    if options.kind == "program":
        return options.target, options.args
    # -u: what a rank prints is shown at once, as under torchrun.
    program = ("-u", worker_main.__file__, str(os.getpid()), options.kind, options.target)
    return sys.executable, (*program, *options.args)


def _torchs_rendezvous(options: RunOptions, run_id: str) -> RendezvousHandler:
    try:
        return get_rendezvous_handler(
            RendezvousParameters(
                backend=options.rdzv_backend,
                endpoint=options.rdzv_endpoint,
                run_id=run_id,
                min_nodes=options.nnodes[0],
                max_nodes=options.nnodes[1],
                local_addr=options.local_addr,
                **{"timeout": str(int(options.rdzv_timeout_s)), **options.rdzv_conf},
            )
        )
    except (ValueError, TorchRendezvousError) as error:
        fix = "Backends are static (ddpilot's own), c10d, etcd and etcd-v2; --rdzv-endpoint is host:port"
        raise RendezvousError(f"preparing the {options.rdzv_backend} rendezvous", found=str(error), fix=fix) from error
