# SPDX-License-Identifier: Apache-2.0
"""The key-value store in which ranks meet: determine its host, host it or connect to it, wait for keys.

`number_env_rendezvous` gives every `init_process_group()` call of user code its own keys in a launch's store: that
store outlives the groups created on it, and torch uses the same keys for each default group, so a second group would
read the addresses of the first and wait for ranks that have exited.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from ddpilot.environments.topology import Topology
from ddpilot.environments.variables import is_loopback
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
            fix="A different program may listen there: check that every rank has the same MASTER_ADDR and MASTER_PORT.",
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


_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1


def wait_for_keys(store: Store, keys: Sequence[str], limit_s: float) -> bool:
    """True if all `keys` were in `store` within `limit_s` seconds; checks at least once.

    `Store.wait` is not used because its timeout prints C++ messages to stderr. The polling interval grows, so that
    thousands of ranks do not keep the store busy.
    """
    deadline = time.monotonic() + limit_s
    pause_s = _FIRST_PAUSE_S
    asked = list(keys)
    while not store.check(asked):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


Handler = Callable[..., Iterator[tuple[Store, int, int]]]


def number_env_rendezvous(addr: str, port: int) -> None:
    """Wrap torch's `env://` and `tcp://` rendezvous in this process, for a launch whose store is at `addr`:`port`.

    Call this once in a rank, before user code. If an agent hosts the store (TORCHELASTIC_USE_AGENT_STORE=True), the
    n-th group of a rank gets the n-th part of that store. A loopback address (such as tutorials'
    `MASTER_ADDR="localhost"; MASTER_PORT="12355"`) then means the launch's store too, since no server would listen
    elsewhere. Any other address is passed to torch after checking that its name resolves: torch retries a name that
    does not for half a minute and then only reports a timeout.
    """
    # `torch.distributed` has a function of the same name, which hides the module.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Handler] = module._rendezvous_handlers
    for scheme in ("env", "tcp"):
        handlers[scheme] = _numbered(handlers[scheme], addr, port)


def _numbered(original: Handler, addr: str, port: int) -> Handler:
    def handler(url: str, timeout: timedelta = default_pg_timeout, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        asked = urlparse(url)
        host = asked.hostname or os.environ.get("MASTER_ADDR", "")
        at = asked.port or os.environ.get("MASTER_PORT", "")
        ours = is_loopback(host) or (host, str(at)) == (addr, str(port))
        query = {name: values[0] for name, values in parse_qs(asked.query).items()}
        rank = query.get("rank", os.environ.get("RANK"))
        world_size = query.get("world_size", os.environ.get("WORLD_SIZE"))
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if host and not ours:
            check_resolves(host)
        if not (is_agents and ours) or rank is None or world_size is None:  # torch reports what is missing
            yield from original(url, timeout=timeout, **kwargs)
            return
        store = TCPStore(addr, port, is_master=False, timeout=timeout, wait_for_workers=False)
        # If some ranks failed while joining, counts differ between ranks: start a new count at every restart.
        mine = f"ddpilot/{asked.scheme}/restart{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        turn = store.add(f"{mine}/turns/{int(rank)}", 1)
        yield PrefixStore(f"{mine}/turn{turn}", store), int(rank), int(world_size)

    return handler
