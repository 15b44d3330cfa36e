# SPDX-License-Identifier: Apache-2.0
"""The arguments of a single process's Trainer become those of the session's job."""

from __future__ import annotations

from typing import Any

import pytest

from ddpilot.integrations.lightning.app import resolve_arguments

FOUR_ON_TWO_NODES = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}


@pytest.mark.parametrize("devices", ["auto", 1, "1", -1, "-1"])
def test_resolve_arguments_uses_all_ranks_when_one_device_was_meant(devices: Any) -> None:
    """Each spelling of one process becomes the ranks of this node; nodes are counted too."""
    given = {"devices": devices, "num_nodes": 1, "strategy": "auto"}
    assert resolve_arguments(given, FOUR_ON_TWO_NODES) == {"devices": 2, "num_nodes": 2, "strategy": "ddp"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("ddp_notebook", "ddp"),
        ("ddp_spawn", "ddp"),
        ("ddp_fork_find_unused_parameters_true", "ddp_find_unused_parameters_true"),
        ("ddp", "ddp"),
        ("fsdp", "fsdp"),
    ],
)
def test_resolve_arguments_starts_no_processes(given: str, wanted: str) -> None:
    """Strategies that start processes from a notebook become the one that finds them running."""
    arguments = {"devices": "auto", "num_nodes": 1, "strategy": given}
    assert resolve_arguments(arguments, FOUR_ON_TWO_NODES)["strategy"] == wanted


def test_resolve_arguments_keeps_explicit_values() -> None:
    """A number of devices or nodes, a list of them, a strategy object and all other arguments stay."""
    strategy = object()
    for devices in (2, [0, 1]):
        given = {"devices": devices, "num_nodes": 2, "strategy": strategy, "precision": "bf16-mixed"}
        assert resolve_arguments(given, FOUR_ON_TWO_NODES) == given


def test_resolve_arguments_changes_nothing_when_the_session_has_one_rank() -> None:
    """Lightning's own choice is right there."""
    given = {"devices": "auto", "num_nodes": 1, "strategy": "auto"}
    assert resolve_arguments(given, {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}) == given
