# SPDX-License-Identifier: Apache-2.0
"""Open MPI, MVAPICH, MPICH, Intel MPI and PALS, alone and inside Slurm."""

from __future__ import annotations

import pytest

from ddpilot.environments.detect import detect_topology
from ddpilot.errors import TopologyError

FAMILIES = {
    "openmpi": "OMPI_COMM_WORLD_{}",
    "mvapich": "MV2_COMM_WORLD_{}",
    "mvapich 3": "MVP_COMM_WORLD_{}",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PALS_NODEID": "1", "PALS_APID": "ab-1"}
ADDRESS = {"MASTER_ADDR": "n1", "MASTER_PORT": "15001"}
SLURM_PAIR = {
    "SLURM_JOB_ID": "9",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "n1",
}


def family_environ(pattern: str) -> dict[str, str]:
    """Rank 3 of 4, two on each of two machines."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {pattern.format(name): value for name, value in zip(names, "3412", strict=True)}


@pytest.mark.parametrize(("label", "pattern"), FAMILIES.items())
def test_mpi_families_give_the_same_topology(label: str, pattern: str) -> None:
    """Open MPI and both generations of MVAPICH differ in names alone."""
    topology = detect_topology({**family_environ(pattern), **ADDRESS})
    assert topology.environment == label.split()[0]
    assert (topology.rank, topology.world_size, topology.local_rank, topology.local_world_size) == (3, 4, 1, 2)
    assert (topology.node_rank, topology.nnodes, topology.master_addr, topology.master_port) == (1, 2, "n1", 15001)
    assert pattern.format("RANK") + "=3" in topology.how


def test_pmi_ranks_are_found() -> None:
    """MPICH and Intel MPI: PMI for the job, MPI_LOCAL* for the machine."""
    topology = detect_topology({**PMI, **ADDRESS})
    assert (topology.environment, topology.rank, topology.local_rank, topology.node_rank) == ("pmi", 3, 1, 1)


def test_pals_needs_the_number_of_ranks_from_the_user() -> None:
    """Cray's PALS sets rank, local rank and node, never the number of ranks."""
    with pytest.raises(TopologyError, match="WORLD_SIZE is not set") as caught:
        detect_topology({**PALS, **ADDRESS})
    assert caught.value.variable == "WORLD_SIZE"
    topology = detect_topology({**PALS, **ADDRESS, "WORLD_SIZE": "4"})
    assert (topology.environment, topology.rank, topology.node_rank, topology.nnodes) == ("pmi", 3, 1, 2)


@pytest.mark.parametrize("pattern", FAMILIES.values())
def test_mpi_single_rank_is_alone(pattern: str) -> None:
    """One rank starts no job that waits for others."""
    topology = detect_topology({pattern.format("RANK"): "0", pattern.format("SIZE"): "1"})
    assert topology.environment == "alone"
    assert pattern.format("SIZE") + "=1" in topology.how


def test_mpi_on_one_machine_meets_at_loopback_and_a_port_from_the_job() -> None:
    """All ranks of one Open MPI job derive the same port; ranks of a different job derive a different one."""
    local = {**family_environ("OMPI_COMM_WORLD_{}"), "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    first = detect_topology({**local, "PMIX_NAMESPACE": "prterun-a-1@1"})
    second = detect_topology({**local, "PMIX_NAMESPACE": "prterun-a-2@1"})
    assert (first.master_addr, first.nnodes) == ("127.0.0.1", 1)
    assert first.master_port != second.master_port
    assert "PMIX_NAMESPACE=prterun-a-1@1" in first.how


def test_mpi_takes_local_numbers_from_the_user_when_the_launcher_gives_none() -> None:
    """MPICH's mpiexec.gforker sets no local rank; LOCAL_RANK and LOCAL_WORLD_SIZE by hand complete it."""
    bare = {"PMI_RANK": "1", "PMI_SIZE": "2", **ADDRESS}
    with pytest.raises(TopologyError, match="Set LOCAL_RANK") as caught:
        detect_topology(bare)
    assert caught.value.variable == "MPI_LOCALRANKID"
    topology = detect_topology({**bare, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert (topology.local_rank, topology.nnodes) == (1, 1)


def test_mpi_wants_nodes_named_when_they_are_not_filled_in_order() -> None:
    """mpirun --map-by node: the machine's number cannot be derived, GROUP_RANK and GROUP_WORLD_SIZE give it."""
    cyclic = {**family_environ("OMPI_COMM_WORLD_{}"), **ADDRESS, "OMPI_COMM_WORLD_RANK": "2"}
    with pytest.raises(TopologyError, match="GROUP_RANK is not set") as caught:
        detect_topology(cyclic)
    assert caught.value.variable == "GROUP_RANK"
    assert detect_topology({**cyclic, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}).node_rank == 0


@pytest.mark.parametrize(
    ("change", "variable"),
    [
        ({"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": ""}, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ({"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2"}, "GROUP_RANK"),
        ({"GROUP_WORLD_SIZE": "1"}, "GROUP_WORLD_SIZE"),
        ({"GROUP_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({"MASTER_PORT": ""}, "MASTER_PORT"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE"),
    ],
)
def test_mpi_names_the_variable_that_is_missing_or_wrong(change: dict[str, str], variable: str) -> None:
    """The error has the variable, its value and the fix."""
    with pytest.raises(TopologyError) as caught:
        detect_topology({**family_environ("OMPI_COMM_WORLD_{}"), **ADDRESS, **change})
    assert caught.value.variable == variable
    assert variable in caught.value.found
    assert caught.value.fix


def test_mpi_under_srun_is_slurm_when_both_agree() -> None:
    """srun --mpi=pmi2 sets both: Slurm also knows the address."""
    topology = detect_topology({**SLURM_PAIR, "PMI_RANK": "1", "PMI_SIZE": "2"})
    assert (topology.environment, topology.master_addr) == ("slurm", "n1")


def test_mpi_under_srun_is_refused_when_they_disagree() -> None:
    """Two answers without a sign of which launcher is nearer: neither is guessed."""
    with pytest.raises(TopologyError, match="PMI_RANK=0, but srun set SLURM_PROCID=1") as caught:
        detect_topology({**SLURM_PAIR, "PMI_RANK": "0", "PMI_SIZE": "2"})
    assert caught.value.variable == "PMI_RANK"


def test_mpi_ranks_count_when_mpirun_runs_in_a_shell_of_slurm() -> None:
    """A batch script is alone, the mpirun that it calls is not."""
    shell = {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    mpirun = family_environ("OMPI_COMM_WORLD_{}")
    assert detect_topology(shell).environment == "alone"
    assert detect_topology({**shell, **mpirun, **ADDRESS}).environment == "openmpi"


@pytest.mark.parametrize(
    ("prefix", "example"),
    [
        (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"), "mpirun -x MASTER_PORT=15000"),
        (("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"), "mpiexec -genv MASTER_PORT 15000"),
    ],
)
def test_mpi_without_a_port_shows_the_option_of_its_own_launcher(prefix: tuple[str, ...], example: str) -> None:
    """Open MPI's mpirun knows no -genv."""
    rank, size, local_rank = prefix
    local_size = "OMPI_COMM_WORLD_LOCAL_SIZE" if rank.startswith("OMPI") else "MPI_LOCALNRANKS"
    with pytest.raises(TopologyError, match=example):
        detect_topology({rank: "1", size: "2", local_rank: "1", local_size: "2"})
