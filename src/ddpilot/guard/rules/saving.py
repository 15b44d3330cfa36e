# SPDX-License-Identifier: Apache-2.0
"""DDP603: several ranks write a checkpoint to the same file."""

from __future__ import annotations

from collections.abc import Iterable

from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.notes import SaveNote
from ddpilot.guard.rules.rule import NS_PER_S, ByRank, RuleContext, WaitingRule, finding_at_line, line_of
from ddpilot.record.journal import Entry

WITHIN_NS = 5 * NS_PER_S
"""Maximum time from the end of one rank's write to the start of the next one's."""
_MAX_PATHS = 1024


class AllRanksSave(WaitingRule[SaveNote]):
    """Compares where and when ranks of one machine write with torch.save or safetensors."""

    kinds = ("save",)

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._saves: ByRank[tuple[str, str], SaveNote] = ByRank(_MAX_PATHS)

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        note: SaveNote = entry.values
        saves = self._saves.put((note["host"], note["path"]), rank, note)
        close = {other: one for other, one in saves.items() if other != rank and _are_close(one, note)}
        if close:
            for other, one in {**close, rank: note}.items():
                self._wait(line_of(note["site"]), other, one, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, SaveNote]) -> Finding:
        first = next(iter(by_rank.values()))
        begun = min(one["start_ns"] for one in by_rank.values())
        times = [
            f"rank {rank}: {(one['start_ns'] - begun) / 1e6:.0f} to {(one['end_ns'] - begun) / 1e6:.0f} ms"
            for rank, one in list(by_rank.items())[:8]
        ]
        return finding_at_line("DDP603", by_rank, f"{render_ranks(by_rank)} write {first['path']}", *times)


def _are_close(one: SaveNote, other: SaveNote) -> bool:
    return one["start_ns"] <= other["end_ns"] + WITHIN_NS and other["start_ns"] <= one["end_ns"] + WITHIN_NS
