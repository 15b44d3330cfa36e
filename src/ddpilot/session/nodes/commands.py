# SPDX-License-Identifier: Apache-2.0
"""The commands that start host processes: `ssh` for one node, `srun` for all nodes of an allocation."""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Sequence
from typing import Any

import psutil

from ddpilot.environments.variables import is_loopback
from ddpilot.launching.rank_environment import python_command
from ddpilot.module_names import SESSION_HOST

SSH_VARIABLE = "DDPILOT_SSH"
"""The command to use in place of `ssh`, with options, such as "ssh -F my_config"."""

_SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")


def host_command() -> list[str]:
    """Return the command line of a host process: this interpreter, with this one's module path."""
    return python_command(f"sys.argv[:] = ['ddpilot']; from {SESSION_HOST} import main; main()")


def ssh_command(host: str) -> list[str]:
    """Return the command that starts a host process on `host`."""
    ssh = shlex.split(os.environ.get(SSH_VARIABLE) or "ssh")
    return [*ssh, *_SSH_OPTIONS, "--", host, f"exec {shlex.join(host_command())}"]


def srun_command(num_nodes: int, options: Sequence[str]) -> list[str]:
    """Return the command that starts one host process on each node of an allocation, as a step of its own.

    `--overlap`: the step may share CPUs with the step in which the notebook itself may run. A node that fails must not
    end the step, as the ranks of the others keep their variables.
    """
    return [
        "srun",
        *options,
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes}",
        "--ntasks-per-node=1",
        "--overlap",
        "--cpu-bind=none",
        "--export=ALL",
        "--kill-on-bad-exit=0",
        "--no-kill",
        "--unbuffered",
        "--job-name=ddpilot-session",
        *host_command(),
    ]


def first_line(
    *,
    node_rank: int | None,
    num_nodes: int,
    directory: str,
    port: int | None = None,
    certificate: str = "",
    keys: Sequence[str] = (),
) -> bytes:
    """Return the line for the standard input of a host. `port`: where the parent listens; None over ssh."""
    given: dict[str, Any] = {
        "node_rank": node_rank,
        "num_nodes": num_nodes,
        "directory": directory,
        "port": port,
        "addresses": own_addresses() if port is not None else [],
        "certificate": certificate,
        "keys": list(keys),
    }
    return json.dumps(given).encode() + b"\n"


def own_addresses() -> list[str]:
    """Return the IPv4 addresses at which nodes may reach this machine, loopback last."""
    stats = psutil.net_if_stats()
    found = [
        each.address
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
        for each in addresses
        if each.family == socket.AF_INET
    ]
    return sorted(dict.fromkeys(found), key=is_loopback)
