# SPDX-License-Identifier: Apache-2.0
"""Give every `torch.distributed.init_process_group()` call of user code its own keys in a launch's store.

The store outlives the groups created on it, and torch uses the same keys for each default group: a second group would
read the addresses of the first and wait for ranks that have exited.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from ddpilot.environments.variables import is_loopback
from ddpilot.group.address import check_resolves

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
