# SPDX-License-Identifier: Apache-2.0
"""Uses of DDP, or of alternatives to it, that cost time or have no effect."""

from __future__ import annotations

from collections.abc import Iterable

from ddpilot.findings.finding import Finding
from ddpilot.guard.notes import ParametersNote, StepNote, SyncedNote, UnusedNote
from ddpilot.guard.rules.rule import (
    BoundedDict,
    ByRank,
    Rule,
    RuleContext,
    WaitingRule,
    finding_at_line,
    line_of,
    num_ranks_of,
    some,
)
from ddpilot.record.journal import Entry

NUM_IN_VAIN = 2
"""Number of backwards reduced despite `no_sync` before the warning."""

_AGAIN_AFTER = 16
"""The warning is repeated after this many more: in a session they may belong to a different cell."""


class NoSyncInVain(Rule):
    """DDP328: `no_sync` around a backward whose forward ran outside of it."""

    kinds = ("step",)
    compares_ranks = False

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._num: BoundedDict[tuple[int, tuple[str, int]], int] = BoundedDict(256)

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        note: StepNote = entry.values
        site = note.get("in_vain")
        if not site:
            return
        key = rank, line_of(site)
        self._num[key] = num = self._num.get(key, 0) + 1
        if num % _AGAIN_AFTER == NUM_IN_VAIN:
            seen = f"seen before {num} optimizer steps, last before step {note['step']}"
            summary = "no_sync() has no effect here: gradients were reduced in every backward"
            yield finding_at_line("DDP328", {rank: {"site": site}}, summary, seen)


class DataParallel(Rule):
    """DDP330: `nn.DataParallel` trains in a job of several ranks."""

    kinds = ("data_parallel",)
    compares_ranks = False

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        summary = f"nn.DataParallel trains a model in a job of {self._context.world_size} ranks"
        yield finding_at_line("DDP330", {rank: entry.values}, summary)


class NeedlessFindUnused(Rule):
    """DDP502: `find_unused_parameters=True` for a model that uses all of its parameters."""

    kinds = ("unused",)
    compares_ranks = False

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._needless: ByRank[tuple[str, str], UnusedNote] = ByRank()

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        note: UnusedNote = entry.values
        if not note["num_bytes"]:
            found = self._needless.put((note["group"], note["ordinal"]), rank, note)
            if len(found) == num_ranks_of(note["group"], self._context.world_size):
                summary = f"no parameter was unused in the first {note['num_backwards']} backwards, on any rank"
                yield finding_at_line("DDP502", dict(sorted(found.items())), summary)


class GradientsMissing(WaitingRule[tuple[str, ParametersNote]]):
    """DDP308 and DDP310: DDP failed because gradients of frozen or unused parameters are missing."""

    kinds = ("frozen", "left_out")
    compares_ranks = False

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        """Wait for other ranks that miss the same gradients at the same line; see `Rule.feed`."""
        note: ParametersNote = entry.values
        key = (entry.kind, line_of(note["site"]), note["num"], tuple(note["names"]))
        self._wait(key, rank, (entry.kind, note), entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, tuple[str, ParametersNote]]) -> Finding:
        kind, note = next(iter(by_rank.values()))
        num = note["num"]
        code, what = ("DDP308", "took no part in the backward pass")
        if kind == "frozen":
            code, what = ("DDP310", f"{'were' if num > 1 else 'was'} frozen after the model was wrapped")
        summary = f"{num} parameter{'s' * (num > 1)} {what}: {some(note['names'], total=num)}"
        return finding_at_line(code, {rank: each for rank, (_, each) in by_rank.items()}, summary)


_UNITS = ("B", "kB", "MB", "GB")


class AccumulationSynced(WaitingRule[SyncedNote]):
    """DDP505: the first steps of a model accumulate gradients, and every backward is reduced."""

    kinds = ("synced",)
    compares_ranks = False

    def _finding(self, by_rank: dict[int, SyncedNote]) -> Finding:
        note = next(iter(by_rank.values()))
        least, most, num_bytes = note["least"], note["most"], note["num_bytes"]
        num = str(most) if least == most else f"{least} to {most}"
        return finding_at_line(
            "DDP505",
            by_rank,
            f"each update exchanges its gradients {num} times: {_format_bytes(most * num_bytes)} instead of "
            f"{_format_bytes(num_bytes)}",
            f"each step accumulates {num} backwards, and DDP all-reduces in each of them",
            f"gradients of the model: {_format_bytes(num_bytes)}",
        )


def _format_bytes(num_bytes: float) -> str:
    for unit in _UNITS:
        if num_bytes < 1000 or unit == _UNITS[-1]:
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}"
