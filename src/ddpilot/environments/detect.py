# SPDX-License-Identifier: Apache-2.0
"""Detect the topology: which launcher started this process, and the variables it set."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddpilot.environments.mpi import check_agreement, detect_mpi, find_family, is_own_launch
from ddpilot.environments.slurm import detect_slurm
from ddpilot.environments.topology import Topology, alone
from ddpilot.environments.torchrun import detect_torchrun, is_complete, refuse_partial
from ddpilot.environments.variables import Environ, quote, read_int, read_switch, read_text
from ddpilot.errors import TopologyError


def detect_topology(environ: Mapping[str, str], *, distributed: bool | None = None) -> Topology:
    """Detect the topology of this process from the variables in `environ`. Reads nothing else and changes nothing.

    Checked in this order: torchrun's variables (also set by a ddpilot launch, or by hand), a task of Slurm's srun, an
    MPI rank (before Slurm if mpirun itself started it inside a Slurm job), a single process.

    `distributed` overrides the variable `DDPILOT_DISTRIBUTED` (1, 0 or auto): True raises if the process is not part of
    a job, False ignores launchers' variables, None (the default) detects.

    Raises `TopologyError`, naming the variable, if one is missing or two contradict each other.
    """
    origin = "distributed" if distributed is not None else "DDPILOT_DISTRIBUTED"
    wanted = distributed if distributed is not None else _read_wanted(environ)
    given = f"{origin}={distributed if distributed is not None else environ.get(origin)}"
    if wanted is False:
        return alone(f"Alone because {given}")
    topology = _find(environ)
    if wanted and not topology.is_distributed:
        raise TopologyError(
            "detecting the topology",
            variable=origin if distributed is None else "RANK",
            found=f"{given} requires a job of several ranks, but no launcher's variables are set ({topology.how})",
            fix="Start the program with torchrun, srun, mpirun or ddpilot, or leave the choice to detection",
        )
    return topology


def _read_wanted(environ: Mapping[str, str]) -> bool | None:
    """Return the value of `DDPILOT_DISTRIBUTED`; None for auto or empty. Raises `TopologyError` for other values."""
    if environ.get("DDPILOT_DISTRIBUTED", "").strip().lower() == "auto":
        return None
    fix = "Set it to 1 (must be distributed), 0 (alone) or auto, or unset it"
    return read_switch(environ, "DDPILOT_DISTRIBUTED", fix)


def _find(environ: Environ) -> Topology:
    by_hand = read_text(environ, "RANK") is not None
    if by_hand and is_complete(environ):
        return detect_torchrun(environ) or _one_by_hand(environ)
    inner = _find_scheduler(environ)
    if inner.is_distributed:
        _check_by_hand(environ, inner)
        return inner
    if by_hand:
        return detect_torchrun(environ) or _one_by_hand(environ)
    refuse_partial(environ, inner.how)
    return inner


def _one_by_hand(environ: Environ) -> Topology:
    return alone(f"Alone: {quote(environ, 'RANK', 'WORLD_SIZE')} is one rank, and MASTER_ADDR is not set")


def _find_scheduler(environ: Environ) -> Topology:
    """The topology according to Slurm or MPI, whichever launched this process most directly."""
    family = find_family(environ)
    if family and is_own_launch(environ, family):
        # Inside a Slurm job, mpirun starts one helper per node with srun. Its ranks inherit the helper's variables, so
        # all ranks of a node have the same SLURM_PROCID.
        return detect_mpi(environ, family)
    slurm = detect_slurm(environ)
    if slurm and slurm.is_distributed:
        if family:
            check_agreement(environ, family, slurm)
        return slurm
    if family:
        mpi = detect_mpi(environ, family)
        return mpi if mpi.is_distributed or slurm is None else slurm
    return slurm or alone("Alone: no launcher gave this process a rank")


def _check_by_hand(environ: Environ, found: Topology) -> None:
    """Raise `TopologyError` if a variable set by hand contradicts the scheduler's variables."""
    for name, value in (
        ("RANK", found.rank),
        ("WORLD_SIZE", found.world_size),
        ("LOCAL_RANK", found.local_rank),
        ("LOCAL_WORLD_SIZE", found.local_world_size),
    ):
        given = read_int(environ, name)
        if given is not None and given != value:
            raise TopologyError(
                "detecting the topology",
                variable=name,
                found=f"{name}={given}, but it is {value}: {found.how}",
                fix=f"Unset {name}, or set it to {value}",
            )


def topology(distributed: bool | None = None) -> Topology:
    """Return rank, sizes and address of this process, and how they were detected. Not collective.

    Reads the environment variables once, and does not import torch. `distributed`: True requires a launcher's
    environment, False ignores it, None (default) detects it unless DDPILOT_DISTRIBUTED is set. Raises TopologyError,
    which names the variable, if variables contradict each other or one is missing.
    """
    return detect_topology(os.environ, distributed=distributed)
