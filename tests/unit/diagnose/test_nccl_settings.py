# SPDX-License-Identifier: Apache-2.0
"""Settings are suggested with their evidence, and never without."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpilot.diagnose import nccl_settings
from ddpilot.diagnose.diagnosis import Line
from ddpilot.diagnose.nccl_settings import read_infiniband_ports, suggest_settings
from ddpilot.findings.catalog import make_finding
from tests.unit.diagnose.checking import make_facts, make_report
from tests.unit.diagnose.test_network import two_nodes


def add_port(root: Path, card: str, state: str, port: int = 1) -> None:
    """A port of a card, as the kernel shows it."""
    folder = root / "sys/class/infiniband" / card / "ports" / str(port)
    folder.mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")


def test_one_node_needs_no_setting() -> None:
    """The defaults are right."""
    assert list(suggest_settings(make_facts(ranks=(make_report(0),)), ())) == []


def test_several_nodes_get_the_route_to_node_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface that reaches node 0, and why NCCL would take a different one; not what is set already."""
    monkeypatch.setattr(nccl_settings, "route_to_master", lambda facts: "eth0")
    monkeypatch.setattr(nccl_settings, "up_interfaces", lambda: dict.fromkeys(("lo", "veth1", "eth0")))
    facts = make_facts(topology=two_nodes(), root=tmp_path)
    assert list(suggest_settings(facts, ())) == [
        "export GLOO_SOCKET_IFNAME=eth0  # eth0 is the route to node 0 (127.0.0.1)",
        "export NCCL_SOCKET_IFNAME=eth0  # eth0 is the route to node 0 (127.0.0.1); NCCL would take veth1",
    ]
    both = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    assert list(suggest_settings(make_facts(topology=two_nodes(), root=tmp_path, environ=both), ())) == []


def test_infiniband_cards_are_named_by_the_state_of_their_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Active ones if others are down; off if all are down; nothing if all are active."""
    monkeypatch.setattr(nccl_settings, "route_to_master", lambda facts: "eth0")
    given = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    facts = make_facts(topology=two_nodes(), environ=given, root=tmp_path)
    add_port(tmp_path, "mlx5_0", "1: DOWN")
    assert list(suggest_settings(facts, ())) == ["export NCCL_IB_DISABLE=1  # no port of mlx5_0 is ACTIVE"]
    add_port(tmp_path, "mlx5_1", "4: ACTIVE")
    assert list(suggest_settings(facts, ())) == ["export NCCL_IB_HCA=mlx5_1  # ports that are ACTIVE; mlx5_0: not"]
    add_port(tmp_path, "mlx5_0", "4: ACTIVE", port=2)
    assert read_infiniband_ports(tmp_path) == {"mlx5_0": "ACTIVE", "mlx5_1": "ACTIVE"}
    assert list(suggest_settings(facts, ())) == []


def test_debugging_is_suggested_when_live_checks_of_gpus_failed() -> None:
    """NCCL's log, and peer-to-peer copies off if NVML says that they do not work."""
    gpus = make_facts(ranks=(make_report(0, versions={"devices": [{"name": "H100"}]}),))
    failed = Line("values", "live", make_finding("DDP808"))
    broken = Line("peer_access", "devices", make_finding("DDP108", severity="warning"))
    assert list(suggest_settings(gpus, (failed,))) == [
        "export NCCL_DEBUG=INFO  # values failed: NCCL then prints which path it takes"
    ]
    assert len(list(suggest_settings(gpus, (failed, broken)))) == 2
    assert list(suggest_settings(gpus, (broken,))) == []
    assert list(suggest_settings(make_facts(ranks=(make_report(0),)), (failed,))) == []
