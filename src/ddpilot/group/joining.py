# SPDX-License-Identifier: Apache-2.0
"""Implementation of `init_group` for builds of PyTorch that have torch.distributed."""

from __future__ import annotations

import atexit
import os
import sys

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.constants import default_pg_timeout

from ddpilot.environments.detect import detect_topology
from ddpilot.errors import GroupError
from ddpilot.group.creation import form_group
from ddpilot.group.device import detect_device_facts, resolve_device, use_device
from ddpilot.group.existing import existing_group
from ddpilot.group.gloo_threads import let_works_end
from ddpilot.group.process_group import Group
from ddpilot.group.store import connect_store, resolve_endpoint
from ddpilot.group.teardown import take_down

_AT_EXIT_S = 2.0


def join_group(backend: str | None, timeout_s: float | None, distributed: bool | None) -> Group:
    """The group of this job, existing or new, as documented for `init_group`. Collective."""
    let_works_end()
    environ = dict(os.environ)
    topology = detect_topology(environ, distributed=distributed)
    backend = backend or environ.get("DDPILOT_BACKEND") or None
    if dist.is_initialized():
        return existing_group(topology, backend)
    choice = resolve_device(detect_device_facts(environ, topology.local_rank), backend)
    device = use_device(choice)
    limit_s = default_pg_timeout.total_seconds() if timeout_s is None else timeout_s
    alone = not topology.is_distributed
    store = HashStore() if alone else connect_store(resolve_endpoint(topology, environ), limit_s)
    group = form_group(store, topology, choice, device, timeout_s, limit_s)
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)
    return group


def _leave_at_exit() -> None:
    if not dist.is_initialized():
        return
    failed = getattr(sys, "last_type", None) is not None  # set by the interpreter after an uncaught exception
    try:
        group = existing_group(detect_topology({}, distributed=False))
    except GroupError:  # the store is gone already, and the other ranks with it
        take_down(healthy=False)
    else:
        group.leave(peers_limit_s=0.0 if failed else _AT_EXIT_S)
