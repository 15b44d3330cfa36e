# SPDX-License-Identifier: Apache-2.0
"""Create a new process group after the old one was freed; all variables of the ranks are kept."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from ddpilot.environments.topology import Topology
from ddpilot.group.creation import form_group
from ddpilot.group.ddp_models import bind_model, compare_models, find_models
from ddpilot.group.device import detect_device_facts, resolve_device, use_device
from ddpilot.group.process_group import Group
from ddpilot.group.store import Endpoint, connect_store
from ddpilot.group.teardown import take_down


@dataclass(frozen=True)
class Rebuilt:
    """Result of `rebuild_group`: the new group, and how the models of the old one were handled."""

    group: Group
    rebound: int
    """Number of DDP models that now use the new group."""
    unbound: tuple[str, ...] = ()
    """One sentence for every DDP model of this rank that could not be bound to the new group."""
    disagreements: tuple[str, ...] = ()
    """One sentence for every parameter that differs across ranks; the same on every rank."""
    aborted: tuple[str, ...] = ()
    """Names of this rank's old groups whose device communicators were aborted, as in `Freed`. If there are any, models
    and optimizers may hold an unfinished update, even if they are equal on all ranks. Load a checkpoint."""


def rebuild_group(
    topology: Topology,
    endpoint: Endpoint,
    *,
    generation: int,
    backend: str | None = None,
    timeout_s: float | None = None,
    rendezvous_s: float | None = None,
    models: Iterable[DistributedDataParallel] | None = None,
) -> Rebuilt:
    """Destroy the old group of this rank and enter a new one on the store at `endpoint`. Collective.

    Every rank calls it, including restarted ranks, in the thread that runs user code, after `free_group` has returned
    on all of them. `generation` must be the same on all ranks and must not have been used on that store before, even by
    a failed attempt. `timeout_s`: timeout of the new group's collectives (default: torch's); `rendezvous_s`: timeout of
    the wait for the other ranks (default: `timeout_s`). `models`: the DDP models to bind to the new group in place;
    default: all that are alive. Gradients of an interrupted step keep their values, so set them to zero. With NCCL, the
    optimizer step may have been applied with such gradients on the device: see `Rebuilt.aborted`.

    Raises RendezvousError and GroupError like `init_group`. Parameters that differ across ranks (because a rank had
    stepped before the failure, or was restarted) do not raise; they are listed in `Rebuilt.disagreements`.
    """
    kept = find_models() if models is None else list(models)
    aborted = take_down(healthy=False).aborted
    limit_s = rendezvous_s or timeout_s or default_pg_timeout.total_seconds()
    own = replace(endpoint, prefix=f"{endpoint.prefix}/generation{generation}")
    choice = resolve_device(detect_device_facts(os.environ, topology.local_rank), backend)
    device = use_device(choice)
    group = form_group(connect_store(own, limit_s), topology, choice, device, timeout_s, limit_s)
    bound = [bind_model(model, group.process_group) for model in kept]
    unbound = tuple(
        f"{type(model.module).__name__} was on a group of {model.process_group.size()} ranks: wrap it again"
        for model, done in zip(kept, bound, strict=True)
        if not done
    )
    disagreements = compare_models([model for model, done in zip(kept, bound, strict=True) if done], group)
    return Rebuilt(group, sum(bound), unbound, disagreements, aborted)
