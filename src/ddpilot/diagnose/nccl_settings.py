# SPDX-License-Identifier: Apache-2.0
"""Settings of gloo and NCCL that this machine's interfaces and cards call for, each with its evidence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ddpilot.diagnose.checks.network import TRAPS, nccl_interfaces, route_to_master
from ddpilot.diagnose.diagnosis import Line
from ddpilot.diagnose.facts import Facts
from ddpilot.launching.elastic.rendezvous.network import up_interfaces


def suggest_settings(facts: Facts, lines: tuple[Line, ...]) -> Iterator[str]:
    """Lines to paste into a shell, with the evidence as a comment; none if the defaults are right.

    `lines`: of the checks, for settings that help to find a fault.
    """
    given = facts.environ
    if facts.nnodes > 1 and (route := route_to_master(facts)):
        why = f"# {route} is the route to node 0 ({facts.topology.master_addr if facts.topology else ''})"
        names = up_interfaces()
        if "GLOO_SOCKET_IFNAME" not in given:
            yield f"export GLOO_SOCKET_IFNAME={route}  {why}"
        if "NCCL_SOCKET_IFNAME" not in given and (taken := nccl_interfaces(names, "")) != [route]:
            traps = [name for name in taken if name.startswith(TRAPS)]
            yield f"export NCCL_SOCKET_IFNAME={route}  {why}; NCCL would take {', '.join(traps or taken)}"
        yield from _suggest_infiniband(facts)
    failed = [line for line in lines if line.subject == "live" and line.status == "error"]
    if failed and any(report.versions.get("devices") for report in facts.ranks):
        yield f"export NCCL_DEBUG=INFO  # {failed[0].check} failed: NCCL then prints which path it takes"
        if "NCCL_P2P_DISABLE" not in given and any(
            line.check == "peer_access" and line.status != "ok" for line in lines
        ):
            yield "export NCCL_P2P_DISABLE=1  # NVML reports pairs without peer-to-peer access, and live checks failed"


def _suggest_infiniband(facts: Facts) -> Iterator[str]:
    ports = read_infiniband_ports(facts.root)
    active = sorted({card for card, state in ports.items() if state == "ACTIVE"})
    down = sorted(set(ports) - set(active))
    if active and down and "NCCL_IB_HCA" not in facts.environ:
        yield f"export NCCL_IB_HCA={','.join(active)}  # ports that are ACTIVE; {', '.join(down)}: not"
    if down and not active and "NCCL_IB_DISABLE" not in facts.environ:
        yield f"export NCCL_IB_DISABLE=1  # no port of {', '.join(down)} is ACTIVE"


def read_infiniband_ports(root: Path) -> dict[str, str]:
    """State of each InfiniBand card: "ACTIVE" if one of its ports is, otherwise that of its last port."""
    states: dict[str, str] = {}
    for path in sorted((root / "sys/class/infiniband").glob("*/ports/*/state")):
        card = path.parents[2].name
        state = path.read_text().strip().rpartition(": ")[2]  # "4: ACTIVE"
        if states.get(card) != "ACTIVE":
            states[card] = state
    return states
