# SPDX-License-Identifier: Apache-2.0
"""Read torchrun's variables, which may be set by torchrun, by a ddpilot launch, or by hand."""

from __future__ import annotations

from ddpilot.environments.topology import Environment, Topology
from ddpilot.environments.variables import (
    Environ,
    check_nodes,
    is_loopback,
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

_DID = "reading torchrun's variables"
_SHOWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_STARTERS = {"ddpilot": "a ddpilot launch set", "torchrun": "torchrun's variables:"}
_LAUNCHER_HINT = "start the program with torchrun, srun or ddpilot"


def is_complete(environ: Environ) -> bool:
    """True if these variables alone determine this rank, as torchrun's always do."""
    return all(read_text(environ, name) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def detect_torchrun(environ: Environ) -> Topology | None:
    """The topology given by `RANK`, `WORLD_SIZE` and torchrun's other variables.

    Returns None for a world size of 1 without a master address: such a process is not part of a job. Raises
    `TopologyError` if a variable is missing and cannot be derived, or if variables contradict each other.
    """
    rank = require_int(environ, _DID, "RANK", fix=f"Set RANK to the number of this rank, or {_LAUNCHER_HINT}")
    fix = f"Set WORLD_SIZE to the number of ranks, unset RANK to run alone, or {_LAUNCHER_HINT}"
    error = missing(environ, _DID, "WORLD_SIZE", fix=fix, related=_SHOWN)
    world_size = or_raise(read_int(environ, "WORLD_SIZE", minimum=1), error)
    require_below(environ, _DID, "RANK", "WORLD_SIZE")
    master_addr, master_port = read_master(environ)
    if world_size == 1 and master_addr is None and master_port is None:
        return None
    master_addr = or_raise(master_addr, _unset(environ, "MASTER_ADDR", "host name of rank 0"))
    master_port = or_raise(master_port, _unset(environ, "MASTER_PORT", "same free port on every rank"))
    local_rank, local_world_size = _resolve_local(environ, rank, world_size, master_addr)
    node_rank, nnodes = _resolve_node(environ, rank, local_rank, world_size, local_world_size)
    environment = _resolve_starter(environ)
    return Topology(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        nnodes=nnodes,
        master_addr=master_addr,
        master_port=master_port,
        environment=environment,
        how=f"{_STARTERS[environment]} {quote(environ, *_SHOWN, 'MASTER_ADDR', 'MASTER_PORT')}",
    )


def refuse_partial(environ: Environ, otherwise: str) -> None:
    """Raise `TopologyError` if other variables indicate several ranks but `RANK` is not set.

    `otherwise`: description of the topology detected otherwise, for the message.
    """
    for name, alone_at in (("WORLD_SIZE", 1), ("LOCAL_RANK", 0)):
        value = read_int(environ, name)
        if value is not None and value > alone_at:
            fix = f"Set RANK, unset {name} to run alone, or {_LAUNCHER_HINT}. {otherwise}"
            raise missing(environ, _DID, "RANK", fix=fix, related=_SHOWN)


def _unset(environ: Environ, name: str, what: str) -> TopologyError:
    return missing(environ, _DID, name, fix=f"Set {name} to the {what}, or {_LAUNCHER_HINT}", related=_SHOWN)


def _resolve_starter(environ: Environ) -> Environment:
    # A rank may start torchrun itself: that job has its own run id and takes precedence.
    launch_id = read_text(environ, "DDPILOT_LAUNCH")
    return "ddpilot" if launch_id and launch_id == read_text(environ, "TORCHELASTIC_RUN_ID") else "torchrun"


def _resolve_local(environ: Environ, rank: int, world_size: int, master_addr: str | None) -> tuple[int, int]:
    """(local_rank, local_world_size); a missing value is derived only if it is unambiguous."""
    local_rank = read_int(environ, "LOCAL_RANK")
    local_world_size = read_int(environ, "LOCAL_WORLD_SIZE", minimum=1)
    nnodes = read_int(environ, "GROUP_WORLD_SIZE", minimum=1)
    # Ranks whose master address is a loopback address are all on this machine.
    one_node = nnodes == 1 or world_size == 1 or (nnodes is None and is_loopback(master_addr or ""))
    if local_world_size is None and one_node:
        local_world_size = world_size
    if local_rank is None and (one_node or local_world_size == 1):
        local_rank = rank if one_node else 0
    local_rank = or_raise(local_rank, _unset(environ, "LOCAL_RANK", "number of this rank within its machine, from 0"))
    local_world_size = or_raise(
        local_world_size, _unset(environ, "LOCAL_WORLD_SIZE", "number of ranks on this machine")
    )
    if local_rank >= local_world_size or local_world_size > world_size:
        raise TopologyError(
            _DID,
            variable="LOCAL_RANK" if local_rank >= local_world_size else "LOCAL_WORLD_SIZE",
            found=f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world_size}, WORLD_SIZE={world_size}",
            fix="LOCAL_RANK must stay below LOCAL_WORLD_SIZE, and that must not exceed WORLD_SIZE: correct them",
        )
    return local_rank, local_world_size


def _resolve_node(
    environ: Environ, rank: int, local_rank: int, world_size: int, local_world_size: int
) -> tuple[int, int]:
    """(node_rank, nnodes) as torchrun sets them, else derived if all nodes have equally many consecutive ranks."""
    nnodes = read_int(environ, "GROUP_WORLD_SIZE", minimum=1)
    node_rank = read_int(environ, "GROUP_RANK")
    if nnodes is None:
        nnodes = world_size // local_world_size
        if nnodes * local_world_size != world_size:
            raise _unset(environ, "GROUP_WORLD_SIZE", "number of machines")
    if node_rank is None:
        node_rank = rank // local_world_size
        if nnodes * local_world_size != world_size or rank % local_world_size != local_rank:
            raise _unset(environ, "GROUP_RANK", "number of this machine, from 0")
    found = quote(environ, *_SHOWN)
    sizes = {"world_size": world_size, "local_world_size": local_world_size}
    check_nodes(_DID, found, ("GROUP_RANK", "LOCAL_WORLD_SIZE"), **sizes, node=(node_rank, nnodes))
    return node_rank, nnodes
