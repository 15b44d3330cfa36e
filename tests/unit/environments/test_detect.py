# SPDX-License-Identifier: Apache-2.0
"""Detection of launchers, also in recorded environments (`captured.json`), and of DDPILOT_DISTRIBUTED."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpilot.environments.detect import detect_topology
from ddpilot.environments.topology import Topology
from ddpilot.errors import TopologyError

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
)
VALUES = ("0", "1", "2", "4", "", "x", "n[1-2]")


def test_detect_topology_reads_nothing_but_the_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's own environment does not matter, and a read-only mapping is enough."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("DDPILOT_DISTRIBUTED", "maybe")
    before = dict(os.environ)
    assert detect_topology(MappingProxyType({})).environment == "alone"
    assert dict(os.environ) == before


@pytest.mark.parametrize("word", ["0", "false", "No", " OFF "])
def test_detect_topology_stays_alone_when_told_so(word: str) -> None:
    """The variable and the argument both keep a rank alone, also where other variables are broken."""
    broken = {**TORCHRUN, "RANK": "seven"}
    assert detect_topology({**broken, "DDPILOT_DISTRIBUTED": word}).how == f"Alone because DDPILOT_DISTRIBUTED={word}"
    assert detect_topology(broken, distributed=False).how == "Alone because distributed=False"


@pytest.mark.parametrize("word", ["", "auto", "AUTO"])
def test_detect_topology_detects_when_left_to_it(word: str) -> None:
    """auto is the same as nothing."""
    assert detect_topology({**TORCHRUN, "DDPILOT_DISTRIBUTED": word}).environment == "torchrun"
    assert detect_topology({"DDPILOT_DISTRIBUTED": word}).environment == "alone"


@pytest.mark.parametrize("word", ["1", "true", "YES", "on"])
def test_detect_topology_refuses_to_be_alone_when_told_so(word: str) -> None:
    """True without a launcher's variables raises an error that quotes the setting."""
    with pytest.raises(TopologyError, match=f"DDPILOT_DISTRIBUTED={word} requires a job of several ranks") as caught:
        detect_topology({"DDPILOT_DISTRIBUTED": word})
    assert caught.value.variable == "DDPILOT_DISTRIBUTED"
    assert detect_topology({**TORCHRUN, "DDPILOT_DISTRIBUTED": word}).rank == 1
    with pytest.raises(TopologyError, match="distributed=True requires a job of several ranks"):
        detect_topology({}, distributed=True)


def test_detect_topology_says_why_it_would_be_alone_when_that_is_refused() -> None:
    """In a batch script the error for distributed=True carries the hint at srun."""
    script = {"SLURM_JOB_ID": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    with pytest.raises(TopologyError, match="srun python"):
        detect_topology(script, distributed=True)


def test_detect_topology_argument_beats_the_variable() -> None:
    """Also for an invalid value."""
    assert detect_topology({**TORCHRUN, "DDPILOT_DISTRIBUTED": "0"}, distributed=True).rank == 1
    assert not detect_topology({**TORCHRUN, "DDPILOT_DISTRIBUTED": "1"}, distributed=False).is_distributed
    assert detect_topology({**TORCHRUN, "DDPILOT_DISTRIBUTED": "maybe"}, distributed=True).rank == 1


def test_detect_topology_refuses_other_words_than_a_switch_has() -> None:
    """The error names the variable, the value and the words that work."""
    with pytest.raises(TopologyError, match=r"DDPILOT_DISTRIBUTED='maybe'.*auto") as caught:
        detect_topology({"DDPILOT_DISTRIBUTED": "maybe"})
    assert caught.value.variable == "DDPILOT_DISTRIBUTED"


@settings(derandomize=True, deadline=None, database=None)
@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES)))
def test_detect_topology_answers_or_names_a_variable_whatever_is_set(environ: dict[str, str]) -> None:
    """Any mixture gives a valid topology or an error with variable, finding and fix, never a different exception."""
    try:
        answer: Topology | TopologyError = detect_topology(environ)
    except TopologyError as error:
        answer = error
    if isinstance(answer, TopologyError):
        assert answer.variable.isupper()
        assert answer.found
        assert answer.fix
    else:
        assert answer.how


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
    """A batch script and a shell of a 4-task job are alone, and the sentence says how to get 4 ranks."""
    topology = detect_topology(CAPTURED[name]["environ"])
    assert not topology.is_distributed
    assert "SLURM_NTASKS=4" in topology.how
    assert "srun python" in topology.how


@pytest.mark.parametrize("name", IN_TWO_NODES)
def test_detect_topology_asks_for_an_address_when_mpirun_spans_nodes(name: str) -> None:
    """MPI gives no address to meet at; with two nodes it must be set, and the error says so."""
    with pytest.raises(TopologyError, match="MASTER_ADDR is not set") as caught:
        detect_topology(CAPTURED[name]["environ"])
    assert caught.value.variable == "MASTER_ADDR"


@pytest.mark.parametrize("name", IN_TWO_NODES)
def test_detect_topology_believes_mpirun_when_slurm_started_its_helpers(name: str) -> None:
    """srun started one helper per node, so SLURM_PROCID says 1 of 2 where this is rank 3 of 4."""
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
