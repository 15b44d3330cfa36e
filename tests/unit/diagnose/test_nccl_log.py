# SPDX-License-Identifier: Apache-2.0
"""What logs of NCCL mean: each scenario in the words of NCCL 2.7 to 2.27."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpilot.diagnose import nccl_log
from ddpilot.diagnose.diagnosis import Diagnosis, Line
from ddpilot.diagnose.nccl_log import parse_nccl_log, read_infiniband_ports, read_nccl_log, suggest_settings
from ddpilot.errors import LaunchError
from ddpilot.findings.catalog import make_finding
from tests.unit.diagnose.checking import make_facts, make_report
from tests.unit.diagnose.test_network import two_nodes


def lines(host: str, rank: int, *texts: str) -> str:
    """INFO lines of the only process of a host's GPU."""
    return "".join(f"{host}:{4000 + rank}:{5000 + rank} [{rank}] NCCL INFO {text}\n" for text in texts)


def joined(rank: int, size: int) -> str:
    """The text of a rank that has joined."""
    return f"comm 0x55d0 rank {rank} nranks {size} cudaDev 0 nvmlDev 0 busId 1a000 commId 0x9 - Init COMPLETE"


ETHERNET = (
    "gpu1:4000:4000 [0] NCCL INFO NCCL version 2.21.5+cuda12.4\n"
    + lines("gpu1", 0, "Bootstrap : Using ens3:10.0.0.1<0>", "NET/IB : No device found.")
    + lines("gpu1", 0, "NET/Socket : Using [0]ens3:10.0.0.1<0>", "Using network Socket", "Channel 00/02 :    0   1")
    + lines("gpu1", 0, "Channel 01/02 :    0   1", "Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1")
    + lines("gpu1", 0, "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0", joined(0, 2))
    + lines("gpu2", 1, "Bootstrap : Using ens3:10.0.0.2<0>", "NET/IB : No device found.")
    + lines("gpu2", 1, "NET/Socket : Using [0]ens3:10.0.0.2<0>", "Using network Socket", joined(1, 2))
)


def read(tmp_path: Path, text: str) -> Diagnosis:
    """What a log means."""
    path = tmp_path / "nccl.log"
    path.write_text(text, "utf-8")
    return read_nccl_log([str(path)])


def found(diagnosis: Diagnosis) -> dict[str, str]:
    """The findings' first words by code."""
    return {finding.code: f"{finding.summary}; {finding.fix}" for finding in diagnosis.findings}


def test_a_healthy_log_over_ethernet_has_no_finding_and_lines_to_paste(tmp_path: Path) -> None:
    """What is used, and the settings that make it certain."""
    diagnosis = read(tmp_path, ETHERNET)
    assert found(diagnosis) == {}
    texts = {line.check: line.answer for line in diagnosis.lines}
    assert diagnosis.title == "NCCL's log: 2 processes on 2 hosts"
    assert texts["version"] == "NCCL 2.21.5+cuda12.4"
    assert texts["network"] == "TCP (NET/Socket): no InfiniBand card was found"
    assert texts["interfaces"] == "gpu1: ens3 10.0.0.1; gpu2: ens3 10.0.0.2"
    assert texts["rings"] == "2 rings, and trees; the first is 0 1"
    assert texts["groups"] == "2 of 2 ranks have joined"
    assert texts["paths"] == "paths: 1 NET/Socket"
    assert [line.partition("  #")[0] for line in diagnosis.settings] == [
        "export NCCL_SOCKET_IFNAME=ens3",
        "export NCCL_IB_DISABLE=1",
    ]


def test_interfaces_of_containers_and_bridges_are_named_with_the_one_to_take(tmp_path: Path) -> None:
    """Also if they are used besides the right one, and with a label and a color in front, as launchers print."""
    log = ETHERNET.replace("[0]ens3:10.0.0.1<0>", "[0]ens3:10.0.0.1<0> [1]veth75f:fe80::14ad%veth75f<0>")
    diagnosis = read(tmp_path, "".join(f"[rank 0] \x1b[0m {line}" for line in log.splitlines(keepends=True)))
    assert "veth75f, which other hosts cannot reach" in found(diagnosis)["DDP107"]
    assert "NCCL_SOCKET_IFNAME=ens3" in found(diagnosis)["DDP107"]
    log = ETHERNET.replace("ens3:10.0.0.1", "docker0:172.17.0.1").replace("ens3:10.0.0.2", "docker0:172.17.0.1")
    assert "`export NCCL_SOCKET_IFNAME=^lo,docker" in found(read(tmp_path, log))["DDP107"]


def test_page_shows_what_a_log_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/how_to/doctor.md has the whole report of a log in which one host uses the bridge of docker."""
    monkeypatch.setenv("COLUMNS", "120")
    log = ETHERNET.replace("[0]ens3:10.0.0.1<0>", "[0]ens3:10.0.0.1<0> [1]docker0:172.17.0.1<0>")
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "doctor.md").read_text()
    assert f"```text\n{str(read(tmp_path, log)).rstrip()}\n```\n" in page


def test_infiniband_is_read_with_its_cards(tmp_path: Path) -> None:
    """Of one kind it is well; of two kinds one is to be named, and without GPUDirect data takes a detour."""
    cards = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
    log = lines("a", 0, cards, "Using network IB", "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA")
    diagnosis = read(tmp_path, log)
    assert found(diagnosis) == {}
    assert "InfiniBand verbs over mlx5_0:1 (IB), mlx5_1:1 (IB)" in str(diagnosis)
    mixed = log.replace("mlx5_1:1/IB", "mlx5_1:1/RoCE")
    assert "NCCL_IB_HCA=mlx5_0`" in found(read(tmp_path, mixed))["DDP807"]
    assert read(tmp_path, mixed).settings[0].startswith("export NCCL_IB_HCA=mlx5_0  #")
    assert "no GDRDMA" in found(read(tmp_path, log.replace("/GDRDMA", "")))["DDP807"]


def test_infiniband_that_is_turned_off_is_said(tmp_path: Path) -> None:
    """By a variable, whose value is known from the log."""
    log = ETHERNET + lines("gpu1", 0, "NCCL_IB_DISABLE set by environment to 1.")
    assert "NCCL_IB_DISABLE=0" in found(read(tmp_path, log))["DDP807"]
    assert "read: NCCL_IB_DISABLE=1" in str(read(tmp_path, log))


def test_gpus_of_one_host_that_do_not_copy_directly_are_said(tmp_path: Path) -> None:
    """Through shared memory by a variable or by the machine, or through the network."""
    shm = lines("a", 0, "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", joined(0, 2), joined(1, 2))
    is_off = shm + lines("a", 0, "NCCL_P2P_DISABLE set by environment to 1.")
    assert "Unset NCCL_P2P_DISABLE" in found(read(tmp_path, is_off))["DDP108"]
    broken = shm + lines("a", 0, "P2P is disabled between connected GPUs 1 and 0. You can repress this message")
    diagnosis = read(tmp_path, broken)
    assert "through the memory of the host" in found(diagnosis)["DDP108"]
    assert "P2P is disabled between connected GPUs 1 and 0" in str(diagnosis)
    net = shm.replace("SHM/direct/direct", "NET/Socket/0")
    assert "through the network" in found(read(tmp_path, net))["DDP108"]
    assert found(read(tmp_path, shm.replace("SHM/direct/direct", "P2P/CUMEM/read"))) == {}


REFUSED = "misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.0.0.2<4576> failed : Connection refused"
TIMED_OUT = "include/socket.h:390 NCCL WARN Call to connect failed : Connection timed out"
SHARED = "include/shm.h:28 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-4kX"
LOCKED = "misc/ibvwrap.cc:284 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory"
NOT_REACHED = "transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<1> with status=12"
DUPLICATE = "init.cc:520 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a000"


@pytest.mark.parametrize(
    ("warning", "code", "fix"),
    [
        (REFUSED, "DDP107", "NCCL_SOCKET_IFNAME"),
        (TIMED_OUT, "DDP107", "TCP ports"),
        (SHARED, "DDP801", "--shm-size"),
        (LOCKED, "DDP801", "ulimit -l"),
        (NOT_REACHED, "DDP807", "ibstat"),
        (DUPLICATE, "DDP118", "LOCAL_RANK"),
    ],
)
def test_warnings_come_with_what_to_do(tmp_path: Path, warning: str, code: str, fix: str) -> None:
    """Several times, with the time in front as newer versions write it, they are one finding."""
    log = f"[2026-01-02 03:04:05] a:4000:5000 [0] {warning}\na:4000:5000 [0] {warning}\n"
    diagnosis = read(tmp_path, log)
    assert fix in found(diagnosis)[code]
    assert "(2 times)" in str(diagnosis)


def test_ranks_that_did_not_join_and_variables_that_differ_are_named(tmp_path: Path) -> None:
    """Rank 1 began only."""
    log = ETHERNET.replace(f"{joined(1, 2)}", joined(1, 2).replace("COMPLETE", "START"))
    assert found(read(tmp_path, log))["DDP105"].startswith("rank 1 began to join a group of 2 ranks")
    log = ETHERNET + lines("gpu1", 0, "NCCL_ALGO set by environment to Ring")
    log += lines("gpu2", 1, "NCCL_ALGO set by environment to Tree")
    assert "NCCL_ALGO differs between processes: Ring, Tree" in found(read(tmp_path, log))["DDP802"]


def test_a_file_without_nccl_is_refused_with_how_to_record(tmp_path: Path) -> None:
    """And one that is not there."""
    with pytest.raises(LaunchError, match="no line of NCCL") as caught:
        read(tmp_path, "loss 0.5\n")
    assert "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV" in caught.value.fix
    with pytest.raises(LaunchError, match="No such file"):
        read_nccl_log([str(tmp_path / "none.log")])


def test_parse_nccl_log_reads_old_and_new_words() -> None:
    """Versions write `Ring 00` and `Bootstrap:` without a blank."""
    log = parse_nccl_log(
        (lines("a", 0, "Ring 00 : 0[1b000] -> 7[41000] via direct shared memory", "Bootstrap: Using eth0:10.0.0.1<0>"))
        .splitlines()
    )  # fmt: skip
    process = log.processes["a", 4000]
    assert process.paths == {(0, 7): "direct shared memory"}
    assert process.bootstrap == {"eth0": "10.0.0.1"}


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
    monkeypatch.setattr(nccl_log, "route_to_master", lambda facts: "eth0")
    monkeypatch.setattr(nccl_log, "up_interfaces", lambda: dict.fromkeys(("lo", "veth1", "eth0")))
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
    monkeypatch.setattr(nccl_log, "route_to_master", lambda facts: "eth0")
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
