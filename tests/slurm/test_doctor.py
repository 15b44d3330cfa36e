# SPDX-License-Identifier: Apache-2.0
"""`srun ddpilot doctor --nodes` on nodes that differ: names, MTU, versions and the program."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import ddpilot
from tests.slurm.cluster import Cluster
from tests.soak import soak

NODES = 3


def examine(cluster: Cluster, folder: Path, on_each: str = "") -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of the doctor as a step of three nodes. `on_each`: shell before it, in its own mounts."""
    (folder / "lib").mkdir()
    (folder / "train.py").write_text("import lib.model\n")
    (folder / "lib" / "model.py").write_text("x = 1\n")
    command = f'{sys.executable} -m ddpilot doctor --nodes train.py --timeout-s 20 --checkpoint-dir "{folder}" --json'
    rank = "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=n1"
    words = ["srun", f"--nodes={NODES}", "--ntasks-per-node=1", "unshare", "--mount", "bash", "-c"]
    text = f"{rank} MASTER_PORT=29517 OMP_NUM_THREADS=1\n{on_each}\nexec {command}"
    done = cluster.run(*words, text, cwd=folder, check=False, timeout_s=100)
    assert "{\n" in done.stdout, done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout[done.stdout.index("{\n") :])


@soak
def test_equal_nodes_are_ok(cluster: Cluster, tmp_path: Path) -> None:
    """One line for each thing that they have in common."""
    status, found = examine(cluster, tmp_path)
    lines = {line["check"]: line["found"] for line in found["lines"]}
    assert (status, [line for line in found["lines"] if line["status"] == "error"]) == (0, [])
    assert lines["names"] == f"the names of {NODES} nodes resolve to the same addresses on all of them"
    assert lines["mtu"] == "the interfaces between the nodes all have an MTU of 1500 bytes"
    assert lines["code"].endswith("and 1 other Python files are the same on all ranks")
    assert lines["values"].startswith("all_reduce, broadcast and gather_object are right on ranks 0-2")
    assert f"ddpilot {ddpilot.__version__} (" in lines["versions"]


def test_each_difference_is_named_with_its_node_and_what_to_change(cluster: Cluster, tmp_path: Path) -> None:
    """The second node has an old /etc/hosts, jumbo frames, an edited ddpilot, and a copy of the program."""
    (tmp_path / "hosts").write_text(
        "".join(f"{'10.0.0.9' if node == 'n3' else address} {node}\n" for node, address in cluster.addresses.items())
    )
    source = Path(ddpilot.__file__).parents[1]
    shutil.copytree(source, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src" / "ddpilot" / "callbacks.py").write_text("# edited\n")
    (tmp_path / "model.py").write_text("x = 2\n")
    differs = f"""
    if [ "$SLURMD_NODENAME" = n2 ]; then
      mount --bind "{tmp_path}/hosts" /etc/hosts
      mount --bind "{tmp_path}/model.py" "{tmp_path}/lib/model.py"
      mount --bind "{tmp_path}/src" "{source}"
      ip link set eth0 mtu 1400
    fi"""
    status, found = examine(cluster, tmp_path, differs)
    cluster.run(*cluster.on_node("n2"), "ip", "link", "set", "eth0", "mtu", 1500)
    by_code = {line["finding"]["code"]: line["finding"] for line in found["lines"] if line["finding"]}
    assert status == 1
    assert "10.0.0.9 on node 1 (n2)" in by_code["DDP809"]["summary"]
    assert f"of node 1 (n2): `{cluster.addresses['n3']} n3`" in by_code["DDP809"]["fix"]
    assert "1400 on node 1 (n2)" in by_code["DDP810"]["summary"]
    assert by_code["DDP810"]["fix"] == "On n2: `ip link set eth0 mtu 1500`"
    assert "lib/model.py" in by_code["DDP811"]["summary"]
    assert "ranks have different versions of ddpilot" in by_code["DDP802"]["summary"]
