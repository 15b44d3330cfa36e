# SPDX-License-Identifier: Apache-2.0
"""DDP222, DDP223, DDP410, DDP603: faults of single collectives, and several ranks that write one checkpoint file."""

from __future__ import annotations

from collections.abc import Iterable

from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.notes import CollectiveNote, NotAwaitedNote, OnGraphNote, SaveNote
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


class NotAwaited(WaitingRule[NotAwaitedNote]):
    """Reports asynchronous collectives whose work was discarded and whose tensor was used."""

    kinds = ("not_awaited",)
    compares_ranks = False

    def _finding(self, by_rank: dict[int, NotAwaitedNote]) -> Finding:
        note = next(iter(by_rank.values()))
        used = "it was changed in place" if note["how"] == "changed" else "the optimizer took a step with it"
        return finding_at_line(
            "DDP222",
            by_rank,
            f"the result of an asynchronous {note['op']} was used without waiting for it",
            "the line discards the work that the call returns, or assigns it to a name that is never read",
            f"{used}, a tensor of {note['numel']} elements, without a barrier before",
        )


class NotMember(WaitingRule[CollectiveNote]):
    """Reports collectives that torch skipped because this rank is not in their group."""

    kinds = ("not_member",)
    compares_ranks = False

    def _finding(self, by_rank: dict[int, CollectiveNote]) -> Finding:
        note = next(iter(by_rank.values()))
        who = f"{render_ranks(by_rank)}, which {'is' if len(by_rank) == 1 else 'are'} not in its group"
        return finding_at_line("DDP223", by_rank, f"{note['op']} did nothing on {who}")


class OnGraph(WaitingRule[OnGraphNote]):
    """Reports a backward through a collective, or a sum of losses that keeps the graphs of several steps.

    A value that is reduced after its backward is no longer used as a loss, and is not reported.
    """

    kinds = ("on_graph",)
    compares_ranks = False

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        note: OnGraphNote = entry.values
        self._wait((note["case"], line_of(note["site"])), rank, note, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, OnGraphNote]) -> Finding:
        note = next(iter(by_rank.values()))
        op = note["op"]
        seen = f"{op} changed a tensor of {note['numel']} element{'s' * (note['numel'] != 1)} that has a grad_fn"
        if note["case"] == "backward":
            summary = f"the backward goes through {op}, which has no gradient"
            seen += ", and backward was called on it, or on a tensor computed from it"
            why = "torch's collectives change the value and are not recorded in the graph: the gradient is that of "
            why += "this rank's own value, not of the reduced one."
            fix = "Call backward first, and reduce a copy: value = loss.detach().clone()."
        else:
            summary = f"the tensor that {op} reduces holds the graphs of at least {note['losses']} steps"
            why = "Each loss that is added brings its graph, which stays in memory as long as the sum does."
            fix = "Add loss.detach(), or loss.item() if waiting for the device does not matter."
        return finding_at_line("DDP410", by_rank, summary, seen, why=why, fix=fix)
