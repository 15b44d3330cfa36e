# SPDX-License-Identifier: Apache-2.0
"""`doctor`: check this machine, start ranks and check what they do together."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpilot.diagnose.diagnosis import Diagnosis
from ddpilot.diagnose.facts import Facts, explain_error
from ddpilot.diagnose.nccl_log import suggest_settings
from ddpilot.diagnose.registry import run_checks
from ddpilot.environments.detect import detect_topology
from ddpilot.environments.nvml import count_accelerators
from ddpilot.errors import DdpilotError, LaunchError, LaunchTimeoutError, TopologyError
from ddpilot.findings.catalog import find_known
from ddpilot.launcher import Launcher

_GROUP_LIMIT_S = 10.0
_LIVE_LIMIT_S = 60.0
_NUM_ON_CPU = 2
_LAST_PORT = 65535


def doctor(
    *,
    nproc_per_node: int | None = None,
    num_workers: int | None = None,
    checkpoint_dir: str | Path = ".",
    live: bool = True,
    nodes: bool = False,
    script: str | Path | None = None,
    timeout_s: float = 30.0,
    reach: Sequence[str] = (),
) -> Diagnosis:
    """Check this machine before a job runs on it: what was found, line by line, and what to do about it.

    Changes nothing and ends no process.

    - `nproc_per_node`: number of ranks of the job on this machine; None: one per visible accelerator, or 2 on the CPU.
    - `num_workers`: number of DataLoader workers of each rank.
    - `checkpoint_dir`: where checkpoints will be; it need not exist.
    - `live`: True starts the ranks, which join a group, check values and measure times. Use False on a login node.
    - `reach`: addresses, as "host:port", to which this machine, or each node, must be able to connect, such as a
      download server or a port of the login node. Without it nothing outside the job is contacted.
    - `nodes`: True if this process is a rank of a job that torchrun, srun or mpirun started, possibly on several nodes.
      Every node and the network between them is checked, with the job's number of ranks, and the result is the same on
      all ranks. Collective.
    - `script`: with `nodes`, the script that the job will run. Its code, and that of the Python files below its folder,
      is compared between the nodes.
    - `timeout_s`: seconds to wait for the other ranks.

    Raises LaunchError for an impossible number of ranks, in a rank without `nodes`, and with `nodes` in a process that
    is not a rank. Raises TopologyError for wrong environment variables.
    """
    for address in reach:
        _check_address(address)
    known: dict[str, Any] = {
        "environ": dict(os.environ),
        "num_workers": num_workers,
        "checkpoint_dir": Path(checkpoint_dir),
        "reach": tuple(reach),
    }
    if nodes:
        return _examine_job(known, Path(script) if script is not None else None, timeout_s)
    _refuse_in_rank(os.environ)
    num = nproc_per_node if nproc_per_node is not None else count_accelerators(os.environ) or _NUM_ON_CPU
    launcher = Launcher(nproc_per_node=num, output="silent", watch=False, timeout_s=_LIVE_LIMIT_S)
    facts = Facts(nproc_per_node=num, **known)
    facts = _start_ranks(facts, launcher) if live else facts
    title = f"doctor: {socket.gethostname()}, {num} rank{'s' * (num > 1)}{'' if live else ', not started'}"
    lines = tuple(run_checks(facts, ("machine", "ranks")))
    return Diagnosis(title, lines, tuple(suggest_settings(facts, lines)), facts.ranks)


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
        fix = "Give a host and a port, such as huggingface.co:443"
        raise LaunchError("reading `reach`", found=f"{address!r} is not HOST:PORT", fix=fix)


def _refuse_in_rank(environ: Mapping[str, str]) -> None:
    """Raise LaunchError in a rank that a launcher has started: each rank would start ranks of its own."""
    try:
        topology = detect_topology(environ)
    except TopologyError:
        return  # a check shows it
    is_by_hand = topology.environment == "torchrun" and "TORCHELASTIC_RUN_ID" not in environ
    if topology.is_distributed and not is_by_hand:
        raise LaunchError(
            "starting ranks to check",
            found=f"this process is itself a rank: {topology.how}",
            fix="`ddpilot doctor --nodes`, or `doctor(nodes=True)`, checks the job that it belongs to",
        )


def _examine_job(known: dict[str, Any], script: Path | None, timeout_s: float) -> Diagnosis:
    from ddpilot.diagnose.nodes import examine_job

    topology = detect_topology(os.environ)
    if not topology.is_distributed:
        raise LaunchError(
            "checking the nodes of a job",
            found=f"this process is not a rank of a job: {topology.how}",
            fix="Start it on all nodes: `srun ddpilot doctor --nodes`, or `torchrun ... -m ddpilot doctor --nodes`",
        )
    facts = Facts(nproc_per_node=topology.local_world_size, script=script, topology=topology, **known)
    return examine_job(facts, topology, timeout_s)


def _start_ranks(facts: Facts, launcher: Launcher) -> Facts:
    """Return `facts` with the reports of ranks that were started here, or with the reason why there are none."""
    try:
        return replace(facts, ranks=tuple(launcher.run(_examine)))
    except DdpilotError as error:
        known = find_known(str(error))
        kind = (
            "DDP105"
            if isinstance(error, LaunchTimeoutError)
            else "DDP801"
            if isinstance(error, LaunchError)
            else "DDP209"
        )
        code = known[0].code if known else kind
        return replace(facts, live_failure=explain_error(error, code, severity="error"))


def _examine() -> Any:
    from ddpilot.diagnose.ranks import examine_rank

    return examine_rank(_GROUP_LIMIT_S)
