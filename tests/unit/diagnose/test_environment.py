# SPDX-License-Identifier: Apache-2.0
"""Environment variables: the topology, and every row of the table of bad combinations."""

from __future__ import annotations

import platform
from typing import Any

import pytest

from ddpilot.diagnose.checks import environment
from ddpilot.diagnose.combinations import COMBINATIONS, parse_version
from tests.unit.diagnose.checking import make_facts, make_report, statuses, text_of

GPUS = {"torch": "2.13.0", "cuda": "13.0", "driver": "580.65", "devices": [{"name": "H100"}, {"name": "H100"}]}
CONSUMER = {**GPUS, "driver": "535.54", "devices": [{"name": "RTX 4090"}, {"name": "RTX 4090"}]}


def test_topology_says_how_it_was_found() -> None:
    """Alone without variables; as torchrun sets them."""
    assert text_of(environment.topology, make_facts()) == "Alone: no launcher gave this process a rank"
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert "rank 1 of 2 on 1 node(s): torchrun's variables: RANK=1" in text_of(
        environment.topology, make_facts(environ=torchrun)
    )


def test_topology_names_the_variable_that_is_missing() -> None:
    """RANK without WORLD_SIZE is an error with its page."""
    broken = make_facts(environ={"RANK": "1"})
    assert statuses(environment.topology, broken) == ["error DDP101"]
    assert "WORLD_SIZE is not set" in text_of(environment.topology, broken)


def test_variables_shows_what_changes_communication() -> None:
    """Variables of NCCL and OpenMP, and no others."""
    facts = make_facts(environ={"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "HOME": "/x"})
    assert text_of(environment.variables, facts) == "NCCL_DEBUG=INFO, OMP_NUM_THREADS=2"


@pytest.mark.parametrize(
    ("environ", "versions", "code"),
    [
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, {"torch": "2.13.0+cpu"}, "error DDP606"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, GPUS, "warning DDP802"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, {"torch": "2.12.0"}, "warning DDP802"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, GPUS, "warning DDP802"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0"}, GPUS, "warning DDP802"),
        ({"NCCL_BLOCKING_WAIT": "1"}, {"torch": "2.13.0"}, "warning DDP802"),
        ({"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}, {"torch": "2.6.0"}, "error DDP802"),
        ({}, CONSUMER, "error DDP108"),
    ],
)
def test_combinations_finds_each_known_bad_one(environ: dict[str, str], versions: dict[str, Any], code: str) -> None:
    """Alone, with what it does, where that is known from, and what to do."""
    facts = make_facts(environ=environ, ranks=(make_report(0, versions=versions),))
    assert statuses(environment.combinations, facts) == [code]


def test_combinations_finds_an_old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release is that of the running kernel."""
    monkeypatch.setattr(platform, "release", lambda: "4.18.0-477.el8")
    assert "Linux 4.18.0-477.el8: distributed jobs have hung" in text_of(environment.combinations, make_facts())


@pytest.mark.parametrize(
    ("environ", "versions"),
    [
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, GPUS),
        ({"NCCL_P2P_DISABLE": "1"}, {"torch": "2.13.0+cpu"}),
        ({"NCCL_P2P_DISABLE": "0", "CUDA_LAUNCH_BLOCKING": "0"}, GPUS),
        ({"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}, {"torch": "2.7.1"}),
        ({}, {**CONSUMER, "driver": "550.54.14"}),
    ],
)
def test_combinations_is_silent_about_good_ones(environ: dict[str, str], versions: dict[str, Any]) -> None:
    """Other values, other versions, and settings that do not matter without a GPU."""
    facts = make_facts(environ=environ, ranks=(make_report(0, versions=versions),))
    assert statuses(environment.combinations, facts) == ["ok"]


def test_every_combination_has_its_source() -> None:
    """A URL or a page of ddpilot."""
    for known in COMBINATIONS:
        assert known.source.startswith(("https://", "ddpilot explain DDP"))
        assert known.fix
        assert known.consequence


def test_parse_version_reads_numbers_only() -> None:
    """Local parts and texts are ignored."""
    assert parse_version("2.13.0+cpu") == (2, 13, 0)
    assert parse_version("unknown") == ()
