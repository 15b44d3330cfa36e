# SPDX-License-Identifier: Apache-2.0
"""The address of a job's store, and the rank that hosts it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore, Store

from ddpilot.environments.topology import Topology, alone
from ddpilot.errors import RendezvousError
from ddpilot.group.store import Endpoint, number_env_rendezvous, resolve_endpoint

RANK_0 = Topology(
    rank=0,
    local_rank=0,
    world_size=2,
    local_world_size=2,
    node_rank=0,
    nnodes=1,
    master_addr="node1",
    master_port=29501,
    environment="torchrun",
    how="a test",
)


def test_resolve_endpoint_lets_rank_0_host_the_store() -> None:
    """Without an agent, rank 0 hosts and the others connect."""
    assert resolve_endpoint(RANK_0, {}) == Endpoint("node1", 29501, True, "ddpilot/run/0")
    assert resolve_endpoint(replace(RANK_0, rank=1, local_rank=1), {}).hosted_here is False


def test_resolve_endpoint_lets_no_rank_host_when_an_agent_does() -> None:
    """Under a launcher's agent every rank is a client, and each of its restarts has its own keys."""
    environ = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "job7",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    assert resolve_endpoint(RANK_0, environ) == Endpoint("node1", 29501, False, "ddpilot/job7/2")


def test_resolve_endpoint_refuses_a_topology_without_an_address() -> None:
    """Alone there is nowhere to meet."""
    with pytest.raises(RendezvousError, match="MASTER_ADDR=None, MASTER_PORT=None"):
        resolve_endpoint(alone("a test"), {})


RENDEZVOUS = importlib.import_module("torch.distributed.rendezvous")


@pytest.fixture
def torch_answered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs that reached torch's own handlers; the wrapping is undone after the test."""
    urls: list[str] = []

    def own(url: str, **kwargs: object) -> Iterator[tuple[Store, int, int]]:
        urls.append(url)
        yield HashStore(), 1, 2

    monkeypatch.setattr(RENDEZVOUS, "_rendezvous_handlers", {"env": own, "tcp": own, "file": own})
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.9")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return urls


@pytest.mark.parametrize("url", ["env://", "tcp://192.0.2.9:29500?rank=1&world_size=2", "file:///shared/file"])
def test_number_env_rendezvous_leaves_other_addresses_to_torch(torch_answered: list[str], url: str) -> None:
    """An address that is neither the launch's nor on loopback is the user's own business."""
    number_env_rendezvous("127.0.0.1", 41000)
    assert next(RENDEZVOUS._rendezvous_handlers[url.partition(":")[0]](url))[1:] == (1, 2)
    assert torch_answered == [url]


def test_number_env_rendezvous_refuses_a_name_that_does_not_resolve(torch_answered: list[str]) -> None:
    """torch would try for half a minute, and then speak of a timeout."""
    number_env_rendezvous("127.0.0.1", 41000)
    with pytest.raises(RendezvousError, match="no-such-host.invalid: the name does not resolve"):
        next(RENDEZVOUS._rendezvous_handlers["tcp"]("tcp://no-such-host.invalid:29500?rank=1&world_size=2"))
    assert not torch_answered


def test_number_env_rendezvous_leaves_everything_to_torch_when_no_agent_hosts_a_store(
    torch_answered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a launch's store, loopback is where rank 0 will listen."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    number_env_rendezvous("127.0.0.1", 41000)
    next(RENDEZVOUS._rendezvous_handlers["tcp"]("tcp://127.0.0.1:23456?rank=1&world_size=2"))
    assert torch_answered == ["tcp://127.0.0.1:23456?rank=1&world_size=2"]
