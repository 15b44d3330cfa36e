# SPDX-License-Identifier: Apache-2.0
"""The key-value store through which ranks meet: who hosts it, and how this rank connects to it."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ddpilot.environments.topology import Topology
from ddpilot.errors import RendezvousError
from ddpilot.group.address import check_resolves, listen, wait_for_port


@dataclass(frozen=True)
class Endpoint:
    """Where the store is, and under which prefix this job keeps its keys."""

    addr: str
    port: int
    hosted_here: bool
    """Does this rank host the store? False on every rank where a launcher's agent does."""
    prefix: str = "ddpilot"


def resolve_endpoint(topology: Topology, environ: Mapping[str, str]) -> Endpoint:
    """The endpoint that `topology` and `environ` (a launcher's agent store, its restart count) name."""
    if topology.master_addr is None or topology.master_port is None:
        raise RendezvousError(
            "looking for the store of this job",
            found=f"MASTER_ADDR={topology.master_addr}, MASTER_PORT={topology.master_port}",
            fix="Set both to where rank 0 runs, or start with a launcher that sets them.",
            rank=topology.rank,
        )
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run, restart = environ.get("TORCHELASTIC_RUN_ID", "run"), environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    hosted_here = topology.rank == 0 and not agent
    return Endpoint(topology.master_addr, topology.master_port, hosted_here, f"ddpilot/{run}/{restart}")


def connect_store(endpoint: Endpoint, timeout_s: float) -> Store:
    """Connect to the store, hosting it where this rank is to; its keys carry the endpoint's prefix.

    Raises RendezvousError: in under 3 s for a host name that does not resolve, at once for a port that another process
    holds (named), after `timeout_s` seconds where nobody answers. A store hosted here lives as long as this process:
    ranks that enter, leave and enter again could otherwise meet its end instead of its successor.
    """
    check_resolves(endpoint.addr)
    timeout = timedelta(seconds=timeout_s)
    sock = listen(endpoint.addr, endpoint.port) if endpoint.hosted_here else None
    if not endpoint.hosted_here:
        wait_for_port(endpoint.addr, endpoint.port, timeout_s)
    make = functools.partial(
        TCPStore,
        endpoint.addr,
        endpoint.port,
        is_master=endpoint.hosted_here,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    try:
        store = make() if sock is None else host_on(sock.detach(), make)
    except (dist.DistError, RuntimeError) as error:
        raise RendezvousError(
            f"connecting to the store at {endpoint.addr}:{endpoint.port}",
            found=str(error).splitlines()[0],
            fix="Something else may listen there: see that every rank has the same MASTER_ADDR and MASTER_PORT.",
        ) from error
    if endpoint.hosted_here:
        atexit.register(_hold, store)
    return PrefixStore(endpoint.prefix, store)


def host_on(descriptor: int, make: Callable[..., TCPStore]) -> TCPStore:
    """What `make` returns for a store whose server takes the listening socket `descriptor`."""
    try:
        return make(master_listen_fd=descriptor)
    except NotImplementedError:
        return make(master_listen_fd=descriptor, use_libuv=False)  # torch 2.6: its libuv server takes no socket


def _hold(store: Store) -> None:
    """Registered to run at exit for the sake of its argument: the reference keeps the store's server alive."""
