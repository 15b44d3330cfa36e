# SPDX-License-Identifier: Apache-2.0
"""Reads of values are timed, and torch is as before after the end."""

from __future__ import annotations

from typing import Any

import torch

from ddpilot.guard.probe import Notes
from ddpilot.profiler.rank.host_reads import COPIES, READS, HostReads
from ddpilot.record.call_sites import SiteFinder
from ddpilot.record.journal import JournalWriter


def make_reads(path: Any, added: list[bool], is_paused: bool = False) -> HostReads:
    """One whose long reads are added to a list."""
    notes = Notes("reads", JournalWriter(path / "journal", rank=0), rank=0, finder=SiteFinder("torch"), report=print)
    return HostReads(notes, lambda _begin, _end, is_copy: added.append(is_copy), lambda: 5, lambda: is_paused)


def test_short_reads_are_added_up_by_line_and_torch_is_as_before(tmp_path: Any) -> None:
    """Three reads of one line; after it the methods are those of torch."""
    before = {name: getattr(torch.Tensor, name) for name in (*READS, *COPIES)}
    own = set(vars(torch.Tensor))
    reads = make_reads(tmp_path, [])
    undo = reads.install()
    values = [torch.ones(1).item() + float(torch.ones(1)) for _ in range(3)]
    while undo:
        undo.pop()()
    assert values == [2.0] * 3
    assert sum(calls for site, calls, _ in reads.totals() if site == 5) <= 6
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert set(vars(torch.Tensor)) == own


def test_long_reads_are_spans_and_none_in_a_step(tmp_path: Any) -> None:
    """A list of a million values takes long; inside an optimizer's step nothing is observed."""
    for is_paused in (False, True):
        added: list[bool] = []
        undo = make_reads(tmp_path, added, is_paused).install()
        torch.ones(1_000_000).tolist()
        torch.ones(3).to(torch.float64)
        while undo:
            undo.pop()()
        assert added == ([] if is_paused else [False])
