# SPDX-License-Identifier: Apache-2.0
"""What all nodes need to have in common: names, MTU and code."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpilot.diagnose.agreement import check_code, check_mtu, check_names, hash_code, resolve_names
from ddpilot.findings.finding import Finding
from tests.unit.diagnose.checking import make_report

HOSTS = {0: "a", 1: "b", 2: "c"}
TABLE = {"a": ["10.0.0.1"], "b": ["10.0.0.2"], "c": ["10.0.0.3"]}


def test_names_that_resolve_alike_are_ok_also_where_a_node_takes_its_own_for_loopback() -> None:
    """As Debian writes /etc/hosts."""
    tables = {node: {**TABLE, name: ["127.0.1.1"]} for node, name in HOSTS.items()}
    assert list(check_names(HOSTS, tables)) == ["the names of 3 nodes resolve to the same addresses on all of them"]


@pytest.mark.parametrize(("wrong", "shown"), [(["10.0.0.9"], "10.0.0.9"), ([], "does not resolve")])
def test_a_name_that_one_node_resolves_differently_is_an_error_with_the_line_to_change(
    wrong: list[str], shown: str
) -> None:
    """The node that differs is named, and what its /etc/hosts should have."""
    (finding,) = check_names(HOSTS, {0: TABLE, 1: TABLE, 2: {**TABLE, "b": wrong}})
    assert isinstance(finding, Finding)
    assert finding.code == "DDP809"
    assert f"{shown} on node 2 (c)" in finding.summary
    assert "10.0.0.2 on node 0 (a), node 1 (b)" in finding.summary
    assert "of node 2 (c): `10.0.0.2 b`" in finding.fix


def test_names_that_no_other_node_knows_are_said() -> None:
    """Such as those of containers: no error, since addresses serve as well."""
    tables = {node: {"a": [], "b": [], "c": [], name: ["10.0.0.1"]} for node, name in HOSTS.items()}
    for node in tables:
        tables[node][HOSTS[node]] = ["127.0.1.1"]
    assert list(check_names(HOSTS, tables)) == [
        "a, b, c resolve on no other node: ranks can only be reached by address"
    ]


def test_nodes_of_one_machine_are_not_compared() -> None:
    """They have one name."""
    hosts = {0: "a", 1: "a"}
    assert list(check_names(hosts, {0: {"a": ["10.0.0.1"]}, 1: {"a": []}})) == [
        "the names of 2 nodes resolve to the same addresses on all of them"
    ]


def test_resolve_names_has_no_addresses_for_a_name_that_does_not_resolve() -> None:
    """Each name once."""
    assert resolve_names(["localhost", "no-such-host.invalid", "localhost"]) == {
        "localhost": ["127.0.0.1"],
        "no-such-host.invalid": [],
    }


def test_different_mtus_are_a_warning_with_the_command() -> None:
    """For the node that is not as most are."""
    ok = check_mtu(HOSTS, {0: ("eth0", 1500), 1: ("eth0", 1500), 2: ("eth0", None)})
    assert list(ok) == ["the interfaces between the nodes all have an MTU of 1500 bytes"]
    (finding,) = check_mtu(HOSTS, {0: ("eth0", 9000), 1: ("ens1", 1500), 2: ("eth0", 9000)})
    assert isinstance(finding, Finding)
    assert (finding.code, finding.severity) == ("DDP810", "warning")
    assert "9000 on node 0 (a), node 2 (c); 1500 on node 1 (b)" in finding.summary
    assert finding.fix == "On b: `ip link set ens1 mtu 9000`"


def test_code_that_differs_is_an_error_with_the_files(tmp_path: Path) -> None:
    """The script and the modules next to it, without environments and hidden folders."""
    for name in ("train.py", "lib/model.py", ".git/hook.py", "venv/x.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    code = hash_code(tmp_path, tmp_path / "train.py")
    assert list(code) == ["train.py", "lib/model.py"]
    same = [make_report(0, code=code), make_report(1, code=code)]
    assert list(check_code(same)) == [
        f"train.py ({code['train.py']}) and 1 other Python files are the same on all ranks"
    ]
    other = make_report(1, host="b", code={"train.py": code["train.py"], "lib/model.py": "0" * 8})
    (finding,) = check_code([same[0], other])
    assert isinstance(finding, Finding)
    assert (finding.code, finding.severity) == ("DDP811", "error")
    assert finding.evidence == (f"lib/model.py: {code['lib/model.py']} on rank 0; 00000000 on rank 1",)
    assert "in a folder that all nodes share" in finding.fix
    assert list(check_code([make_report(0)])) == []
