# SPDX-License-Identifier: Apache-2.0
"""When a host process ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddpilot.session.host.host import Host


@pytest.mark.parametrize(
    ("lost", "can_start", "is_over"), [("", True, False), ("closed its connection", True, True), ("", False, True)]
)
def test_tick_ends_the_host_without_a_parent_or_a_rank_server(lost: str, can_start: bool, is_over: bool) -> None:
    """A node that can start no ranks counts as lost, so that a restart starts its host again."""
    stopped: list[bool] = []
    host: Any = Host.__new__(Host)
    host._link = SimpleNamespace(lost=lost)
    host._ranks = SimpleNamespace(can_start=can_start)
    host._placement = SimpleNamespace(ranks=())
    host._files = SimpleNamespace(look=lambda ranks: None)
    host._loop = SimpleNamespace(stop=lambda: stopped.append(True))
    host._tick()
    assert bool(stopped) == is_over
