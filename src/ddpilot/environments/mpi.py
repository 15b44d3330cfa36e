# SPDX-License-Identifier: Apache-2.0
"""Read the variables of MPI launchers: Open MPI, MVAPICH, and PMI (MPICH, Intel MPI, Cray's PALS).

They contain ranks and sizes but no master address: that comes from `MASTER_ADDR` and `MASTER_PORT` or, if all ranks are
on one machine, is the loopback address with a port derived from the id of the MPI job.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpilot.environments.topology import Environment, Topology, alone
from ddpilot.environments.variables import (
    Environ,
    check_nodes,
    derive_port,
    first_set,
    missing,
    or_raise,
    quote,
    read_int,
    read_master,
    read_text,
    require_below,
    require_int,
)
from ddpilot.errors import TopologyError

_DID = "reading the variables of an MPI launcher"


@dataclass(frozen=True, kw_only=True)
class MpiFamily:
    """Variable names of one MPI launcher; of several names for one value, the first that is set is used."""

    environment: Environment
    label: str
    rank: str
    sizes: tuple[str, ...]
    local_ranks: tuple[str, ...]
    local_sizes: tuple[str, ...]
    node_ranks: tuple[str, ...] = ("GROUP_RANK",)
    job_ids: tuple[str, ...] = ()
    own_marks: tuple[str, ...] = ()
    """Set by this family's own mpirun and never by srun: shows which one launched the rank if both sets exist."""


_BY_HAND = ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)

_FAMILIES = (
    MpiFamily(
        environment="openmpi",
        label="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        sizes=("OMPI_COMM_WORLD_SIZE",),
        local_ranks=("OMPI_COMM_WORLD_LOCAL_RANK", *_BY_HAND[0]),
        local_sizes=("OMPI_COMM_WORLD_LOCAL_SIZE", *_BY_HAND[1]),
        job_ids=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
        own_marks=("OMPI_COMMAND", "PRTE_LAUNCHED", "OMPI_MCA_orte_launch", "OMPI_MCA_ess_base_jobid"),
    ),
    *(
        MpiFamily(
            environment="mvapich",
            label="MVAPICH",
            rank=f"{prefix}_COMM_WORLD_RANK",
            sizes=(f"{prefix}_COMM_WORLD_SIZE",),
            local_ranks=(f"{prefix}_COMM_WORLD_LOCAL_RANK", *_BY_HAND[0]),
            local_sizes=(f"{prefix}_COMM_WORLD_LOCAL_SIZE", *_BY_HAND[1]),
            own_marks=(f"{prefix}_COMM_WORLD_RANK",),
        )
        for prefix in ("MV2", "MVP")
    ),
    MpiFamily(
        environment="pmi",
        label="MPICH or Intel MPI (PMI)",
        rank="PMI_RANK",
        sizes=("PMI_SIZE",),
        local_ranks=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", *_BY_HAND[0]),
        local_sizes=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", *_BY_HAND[1]),
        node_ranks=("PALS_NODEID", "GROUP_RANK"),
        job_ids=("I_MPI_HYDRA_UUID", "PALS_APID", "PMI_JOBID"),
        own_marks=("MPI_LOCALRANKID",),
    ),
    MpiFamily(
        environment="pmi",
        label="PALS",
        rank="PALS_RANKID",
        # PALS itself does not set the number of ranks.
        sizes=("PMI_SIZE", "WORLD_SIZE"),
        local_ranks=("PALS_LOCAL_RANKID",),
        local_sizes=("PALS_LOCAL_SIZE", *_BY_HAND[1]),
        node_ranks=("PALS_NODEID",),
        job_ids=("PALS_APID",),
    ),
)


def find_family(environ: Environ) -> MpiFamily | None:
    """The MPI launcher whose variables are set, or None."""
    return next((family for family in _FAMILIES if read_text(environ, family.rank) is not None), None)


def is_own_launch(environ: Environ, family: MpiFamily) -> bool:
    """True if the family's own mpirun started this process, whatever other variables are set."""
    return first_set(environ, *family.own_marks) is not None


def check_agreement(environ: Environ, family: MpiFamily, topology: Topology) -> None:
    """Raise `TopologyError` if MPI's variables give a different rank or size than `topology`."""
    for names, value in (((family.rank,), topology.rank), (family.sizes, topology.world_size)):
        given = read_int(environ, *names)
        if given is not None and given != value:
            name = first_set(environ, *names) or ""
            raise TopologyError(
                _DID,
                variable=name,
                found=f"{quote(environ, name)}, but {topology.how}",
                fix=f"Unset {name} if it is left over, or set all of torchrun's variables yourself",
            )


def detect_mpi(environ: Environ, family: MpiFamily) -> Topology:
    """The topology of an MPI rank; a job of one rank counts as no job. Raises `TopologyError` naming the variable."""
    rank = require_int(environ, _DID, family.rank, fix="")
    size_name = first_set(environ, *family.sizes) or family.sizes[-1]
    world_size = require_int(environ, _DID, size_name, fix=f"Set {size_name} to the number of ranks", minimum=1)
    require_below(environ, _DID, family.rank, size_name)
    if world_size == 1:
        return alone(f"Alone: {family.label} started one rank ({quote(environ, family.rank, size_name)})")
    local_rank = _require_local(environ, family, family.local_ranks, 0, "number of this rank within its machine")
    local_world_size = _require_local(environ, family, family.local_sizes, 1, "number of ranks on this machine")
    if local_rank >= local_world_size or local_world_size > world_size:
        name = first_set(environ, *(family.local_ranks if local_rank >= local_world_size else family.local_sizes)) or ""
        shown = quote(environ, *family.local_ranks, *family.local_sizes, size_name)
        raise TopologyError(
            _DID, variable=name, found=shown, fix=f"Correct {name}, or leave these variables as mpirun set them"
        )
    node_rank, nnodes = _resolve_node(environ, family, rank, local_rank, world_size, local_world_size)
    master_addr, master_port, master_from = _resolve_master(environ, family, nnodes)
    names = (family.rank, size_name, *family.local_ranks[:1], *family.local_sizes[:1])
    return Topology(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        nnodes=nnodes,
        master_addr=master_addr,
        master_port=master_port,
        environment=family.environment,
        how=f"{family.label} set {quote(environ, *names)}; {master_from}",
    )


def _require_local(environ: Environ, family: MpiFamily, names: tuple[str, ...], minimum: int, what: str) -> int:
    by_hand = names[-1]
    fix = f"Set {by_hand} to the {what}" if by_hand in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") else f"Set it to the {what}"
    error = missing(environ, _DID, names[0], fix=fix, related=(family.rank, *family.sizes))
    return or_raise(read_int(environ, *names, minimum=minimum), error)


def _resolve_node(
    environ: Environ, family: MpiFamily, rank: int, local_rank: int, world_size: int, local_world_size: int
) -> tuple[int, int]:
    """(node_rank, nnodes) as set by the launcher or the user, else derived from nodes of equal size in rank order."""
    if local_world_size == world_size:
        return 0, 1
    nnodes = read_int(environ, "GROUP_WORLD_SIZE", minimum=1)
    node_rank = read_int(environ, *family.node_ranks)
    even = world_size % local_world_size == 0
    if nnodes is None and even:
        nnodes = world_size // local_world_size
    if node_rank is None and even and rank % local_world_size == local_rank:
        node_rank = rank // local_world_size
    shown = (family.rank, *family.sizes, *family.local_ranks, *family.local_sizes)
    fix = "Fill machines evenly, one after the other, or set GROUP_RANK and GROUP_WORLD_SIZE as torchrun would"
    node = (
        or_raise(node_rank, missing(environ, _DID, "GROUP_RANK", fix=fix, related=shown)),
        or_raise(nnodes, missing(environ, _DID, "GROUP_WORLD_SIZE", fix=fix, related=shown)),
    )
    node_variable = first_set(environ, *family.node_ranks) or "GROUP_WORLD_SIZE"
    variables = (node_variable, first_set(environ, *family.local_sizes) or "")
    found = quote(environ, family.rank, *family.sizes, *family.local_sizes, *family.node_ranks, "GROUP_WORLD_SIZE")
    check_nodes(_DID, found, variables, world_size=world_size, local_world_size=local_world_size, node=node)
    return node


def _resolve_master(environ: Environ, family: MpiFamily, nnodes: int) -> tuple[str, int, str]:
    master_addr, master_port = read_master(environ)
    related = (family.rank, *family.sizes, *family.local_sizes)
    if master_addr is None and nnodes > 1:
        fix = "MPI gives no address to meet at: set MASTER_ADDR to the host name of rank 0, the same on every rank"
        raise missing(environ, _DID, "MASTER_ADDR", fix=fix, related=related)
    job = first_set(environ, *family.job_ids)
    if master_port is None and job is None:
        example = (
            "mpirun -x MASTER_PORT=15000" if family.environment == "openmpi" else "mpiexec -genv MASTER_PORT 15000"
        )
        fix = f"Set MASTER_PORT to the same free port on every rank, such as `{example}`"
        raise missing(environ, _DID, "MASTER_PORT", fix=fix, related=related)
    address = quote(environ, "MASTER_ADDR") or "all ranks on this machine"
    port = quote(environ, "MASTER_PORT") or f"port from {quote(environ, job or '')}"
    return master_addr or "127.0.0.1", master_port or derive_port(environ[job or ""].strip()), f"{address}; {port}"
