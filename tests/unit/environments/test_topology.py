# SPDX-License-Identifier: Apache-2.0
"""The frozen value, its checks and its text."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from ddpilot.environments.topology import Topology, alone
from ddpilot.errors import TopologyError

VALID: dict[str, Any] = {
    "rank": 3,
    "local_rank": 1,
    "world_size": 4,
    "local_world_size": 2,
    "node_rank": 1,
    "nnodes": 2,
    "master_addr": "n1",
    "master_port": 15000,
    "environment": "slurm",
    "how": "srun set SLURM_PROCID=3",
}


@pytest.mark.parametrize(
    ("change", "variable"),
    [
        ({"rank": 4}, "rank"),
        ({"rank": -1}, "rank"),
        ({"local_rank": 2}, "local_rank"),
        ({"node_rank": 2}, "node_rank"),
        ({"world_size": 0, "rank": 0}, "rank"),
        ({"nnodes": 1, "node_rank": 0}, "local_world_size"),
        ({"local_world_size": 4}, "local_world_size"),
        ({"master_addr": None}, "master_addr"),
        ({"master_port": None}, "master_port"),
        ({"master_port": 65536}, "master_port"),
        ({"environment": "alone"}, "world_size"),
        ({"environment": "k8s"}, "environment"),
    ],
)
def test_topology_refuses_impossible_numbers(change: dict[str, Any], variable: str) -> None:
    """Each contradiction is an error that names the field, its value and how the value was found."""
    with pytest.raises(TopologyError) as caught:
        Topology(**(VALID | change))
    assert caught.value.variable == variable
    assert f"{variable}={(VALID | change)[variable]!r}" in caught.value.found
    assert "SLURM_PROCID=3" in caught.value.found


def test_topology_is_frozen() -> None:
    """Who a process is does not change while it runs."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topology(**VALID).rank = 0  # type: ignore[misc]


def test_topology_predicates_tell_rank_zero_and_jobs() -> None:
    """Rank zero is the number 0; a job of one rank is distributed, a process that is alone is not."""
    assert not Topology(**VALID).is_rank_zero
    one = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "node_rank": 0, "nnodes": 1}
    single = Topology(**(VALID | one))
    assert single.is_rank_zero
    assert single.is_distributed
    assert not alone("Alone").is_distributed
    assert alone("Alone").is_rank_zero


def test_topology_prints_as_a_table() -> None:
    """The whole text is compared."""
    assert str(Topology(**VALID)) == (
        "environment  slurm\n"
        "rank         3 of 4\n"
        "local rank   1 of 2\n"
        "node         1 of 2\n"
        "master       n1, port 15000\n"
        "how          srun set SLURM_PROCID=3"
    )


def test_environments_import_without_torch_and_other_heavy_packages() -> None:
    """A fresh interpreter that imports the detection has loaded neither torch nor numpy nor rich nor typer."""
    code = (
        "import sys; import ddpilot.environments.detect; "
        "print([name for name in ('torch', 'numpy', 'rich', 'typer', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "[]\n"
