# SPDX-License-Identifier: Apache-2.0
"""Paths of ranks' rings in a folder."""

from __future__ import annotations

import importlib
from pathlib import Path

from ddpilot.module_names import RECORD_HOOK
from ddpilot.record.hook import find_rings, ring_path, start


def test_rings_are_found_by_rank(tmp_path: Path) -> None:
    """In the order of the ranks, without drafts and other files."""
    for name in ("rank10.ring", "rank2.ring", "rank0.ring", "rank1.ring.new", "rankx.ring", "notes.txt"):
        (tmp_path / name).touch()
    assert list(find_rings(tmp_path).items()) == [(rank, ring_path(tmp_path, rank)) for rank in (0, 2, 10)]
    assert find_rings(tmp_path / "missing") == {}


def test_hook_is_named_as_launchers_call_it() -> None:
    """`RECORD_HOOK` leads to `start`."""
    module, _, name = RECORD_HOOK.partition(":")
    assert getattr(importlib.import_module(module), name) is start
