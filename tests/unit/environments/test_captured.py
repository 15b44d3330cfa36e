# SPDX-License-Identifier: Apache-2.0
"""Environments that real launchers set, recorded once, selected variables, values unchanged but for host names."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddpilot.environments.detect import detect_topology
from ddpilot.errors import TopologyError

CAPTURED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("captured.json").read_text(encoding="utf-8"))
COMPLETE = [name for name, capture in CAPTURED.items() if capture["expected"]]
IN_TWO_NODES = ["openmpi_in_sbatch_rank_3", "mpich_in_sbatch_two_nodes_rank_3"]


@pytest.mark.parametrize("name", COMPLETE)
def test_detect_topology_finds_what_the_launcher_meant(name: str) -> None:
    """Every number and address of a recorded environment is the one that its launcher gave."""
    found = asdict(detect_topology(CAPTURED[name]["environ"]))
    assert found.pop("how")
    assert found == CAPTURED[name]["expected"]


@pytest.mark.parametrize("name", COMPLETE)
def test_detect_topology_says_how_with_variables_and_values(name: str) -> None:
    """The sentence quotes at least one variable of the environment with the value that it has there."""
    environ = CAPTURED[name]["environ"]
    how = detect_topology(environ).how
    assert any(f"{variable}={value}" in how for variable, value in environ.items()), how


@pytest.mark.parametrize("name", ["sbatch_script", "salloc_command", "salloc_shell"])
def test_detect_topology_hints_at_srun_when_alone_in_an_allocation(name: str) -> None:
    """A batch script and a shell of a 4-task job are alone, and the sentence has the command for 4 ranks."""
    topology = detect_topology(CAPTURED[name]["environ"])
    assert not topology.is_distributed
    assert "SLURM_NTASKS=4" in topology.how
    assert "srun python" in topology.how


@pytest.mark.parametrize("name", IN_TWO_NODES)
def test_detect_topology_asks_for_an_address_when_mpirun_spans_nodes(name: str) -> None:
    """MPI sets no master address; with two nodes the user must, and the error asks for it."""
    with pytest.raises(TopologyError, match="MASTER_ADDR is not set") as caught:
        detect_topology(CAPTURED[name]["environ"])
    assert caught.value.variable == "MASTER_ADDR"


@pytest.mark.parametrize("name", IN_TWO_NODES)
def test_detect_topology_believes_mpirun_when_slurm_started_its_helpers(name: str) -> None:
    """srun started one helper per node, so SLURM_PROCID is 1 of 2 on rank 3 of 4."""
    environ = CAPTURED[name]["environ"]
    assert (environ["SLURM_PROCID"], environ["SLURM_STEP_NUM_TASKS"]) == ("1", "2")
    topology = detect_topology({**environ, "MASTER_ADDR": "gpu08", "MASTER_PORT": "15004"})
    assert (topology.rank, topology.world_size, topology.local_rank, topology.node_rank) == (3, 4, 1, 1)
    assert topology.environment in ("openmpi", "pmi")


@pytest.mark.parametrize("name", ["mpich_4_rank_1", "mpich_in_sbatch_rank_1"])
def test_detect_topology_asks_for_a_port_when_the_mpi_job_has_no_id(name: str) -> None:
    """MPICH names no job from which ranks could derive one port: it must be set, then loopback is the address."""
    environ = CAPTURED[name]["environ"]
    with pytest.raises(TopologyError, match="MASTER_PORT is not set") as caught:
        detect_topology(environ)
    assert caught.value.variable == "MASTER_PORT"
    topology = detect_topology({**environ, "MASTER_PORT": "15777"})
    assert (topology.master_addr, topology.master_port, topology.rank) == ("127.0.0.1", 15777, 1)
