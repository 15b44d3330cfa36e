# SPDX-License-Identifier: Apache-2.0
"""The key-value store in which ranks meet: determine its host, host it or connect to it."""

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
    """Address of the store, and the prefix of this job's keys."""

    addr: str
    port: int
    hosted_here: bool
    """True if this rank hosts the store; False on every rank if a launcher's agent hosts it."""
    prefix: str = "ddpilot"


def resolve_endpoint(topology: Topology, environ: Mapping[str, str]) -> Endpoint:
    """The endpoint given by `topology` and by `environ` (agent's store, run id and restart count)."""
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
    """Connect to the store, hosting it if `endpoint.hosted_here`; keys get the endpoint's prefix.

    Raises RendezvousError: in less than 3 s if the host name does not resolve, immediately if a different process
    (named in the error) uses the port, and after `timeout_s` seconds if no server answers. A store hosted here lives as
    long as this process: ranks that leave and enter again could otherwise connect to it while it shuts down.
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
    """Call `make` so that the store's server uses the listening socket `descriptor`, and return the store."""
    try:
        return make(master_listen_fd=descriptor)
    except NotImplementedError:
        return make(master_listen_fd=descriptor, use_libuv=False)  # the libuv server of torch 2.6 accepts no socket


def _hold(store: Store) -> None:
    """Do nothing; registered at exit so that the reference in its argument keeps the store's server alive."""
