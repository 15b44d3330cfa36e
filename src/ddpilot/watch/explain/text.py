# SPDX-License-Identifier: Apache-2.0
"""Format collectives, lines and ranks for reports; `Draft`: the analysis of one snapshot while it is made."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.record.flight_ring.log import Collective, GroupOfRanks
from ddpilot.source.parsed_file import Sources
from ddpilot.user_files import CodeLine
from ddpilot.watch.matching.outcomes import RankOutcome
from ddpilot.watch.matching.waits import peer_of, rank_in_job
from ddpilot.watch.snapshot.model import JobSnapshot, RankSnapshot


@dataclass(slots=True, kw_only=True)
class Draft:
    """The state of a job and the findings about it, while an analysis collects them."""

    job: JobSnapshot
    earlier: JobSnapshot | None
    outcomes: dict[int, RankOutcome]
    sources: Sources
    stall_ns: int
    """How long ranks may wait before an unproven wait becomes a status line."""
    warn_ns: int
    """How long ranks may wait before an unproven wait becomes a warning."""
    findings: list[Finding] = field(default_factory=list)
    status: list[str] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)
    """Ranks whose stacks show more."""
    explained: set[int] = field(default_factory=set)
    """Ranks whose end is explained by a finding."""
    silent: list[Finding] = field(default_factory=list)
    """The findings, among `findings`, that make no rank fail or wait."""
    is_stalled: bool = False

    @property
    def is_interrupted(self) -> bool:
        """True if a rank ended with KeyboardInterrupt, as all ranks of a terminal do on Ctrl-C."""
        errors = (rank.error for rank in self.job.ranks.values())
        return any(error is not None and error.type_name == "KeyboardInterrupt" for error in errors)

    def before(self, rank: int) -> RankSnapshot | None:
        """Return the state of `rank` in the earlier snapshot; None if it is unknown."""
        return self.earlier.ranks.get(rank) if self.earlier is not None else None

    def add_proven(self, finding: Finding, explained: Iterable[int], needs: Iterable[int] = ()) -> None:
        """Add a finding about ranks that cannot continue. `needs`: ranks whose stacks show more."""
        self.is_stalled = True
        self.findings.append(finding)
        self.explained.update(explained)
        self.needs.update(needs)

    def add_status(self, line: str) -> None:
        """Add a line about an unproven wait."""
        self.is_stalled = True
        self.status.append(line)


_UNITS = (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10))  # powers of 1024, as in `bucket_cap_mb`
_MAX_ROWS = 8
_MAX_WHAT_CHARS = 90
_DDP_WORDS = {
    "buffers": "of DDP buffers",
    "bucket order": "of DDP's order of buckets",
    "construction": "of DDP's construction",
    "gradients": "of DDP gradients",
    "join": "of DDP's Join",
    "unused parameters": "of DDP's unused parameters",
}

Row = tuple[str, str, str]
"""Ranks, what they do, and where."""


def name_group(group: GroupOfRanks) -> str:
    """Format a group: ``the default group`` or ``group 2 (ranks 0-3)``."""
    if group.name == "0" or group.description == "default_pg":
        return "the default group"
    name = group.description if group.description not in ("", "undefined") else group.name
    return f"group {name} ({render_ranks(group.ranks)})" if group.ranks else f"group {name}"


def describe(entry: Collective) -> str:
    """Format a collective or point-to-point operation, such as ``all_reduce SUM of float32 [3]``."""
    if entry.is_p2p:
        return _describe_p2p(entry)
    part = entry.ddp
    if part is not None and part.what == "bucket" and part.names:
        names = part.names[0] if len(part.names) == 1 else f"{part.names[0]} .. {part.names[-1]}"
        return f"{entry.op}, DDP gradient bucket {part.index} ({names}, {render_bytes(entry.num_bytes)})"
    if part is not None:
        return f"{entry.op} {_DDP_WORDS.get(part.what, part.what)} ({render_bytes(entry.num_bytes)})"
    reduce_op = f" {entry.reduce_op}" if entry.reduce_op else ""
    preposition = "from" if entry.op in ("broadcast", "scatter") else "to"
    root = f" {preposition} rank {rank_in_job(entry, entry.root)}" if entry.root is not None else ""
    return f"{entry.op}{reduce_op}{_describe_tensors(entry)}{root}"


def describe_shortly(entry: Collective) -> str:
    """Format it without names and sizes."""
    part = entry.ddp
    if part is not None and part.what == "bucket":
        return f"{entry.op} of DDP gradient bucket {part.index}"
    return f"{entry.op} {_DDP_WORDS.get(part.what, part.what)}" if part is not None else entry.op


def _describe_p2p(entry: Collective) -> str:
    peer = peer_of(entry)
    other = "any rank" if peer is None else f"rank {peer}"
    tag = f", tag {entry.tag}" if entry.tag else ""
    return f"{entry.op}{_describe_tensors(entry)} {'to' if entry.op == 'send' else 'from'} {other}{tag}"


def _describe_tensors(entry: Collective) -> str:
    tensors = entry.inputs or entry.outputs
    if not tensors:
        return ""
    count = entry.num_inputs or entry.num_outputs or len(tensors)
    more = f" and {count - 1} more" if count > 1 else ""
    return f" of {tensors[0].dtype} {list(tensors[0].shape)}{more}"


def render_bytes(num_bytes: int) -> str:
    """Format a size, such as ``25.0 MB``."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def render_duration(duration_ns: int) -> str:
    """Format a duration, such as ``2.4 s`` or ``3 min``."""
    seconds = max(0, duration_ns) / 1e9
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def show_file(file: str) -> str:
    """Return `file` relative to the working directory if it is in there."""
    if not os.path.isabs(file):
        return file
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def place_of(line: CodeLine | None) -> CodeLine | None:
    """Return the line as a finding shows it; None if it is unknown."""
    if line is None or not line.file:
        return None
    return CodeLine(show_file(line.file), line.line, line.function, line.text)


def render_place(line: CodeLine | None) -> str:
    """Format file, line number and text; empty if the line is unknown."""
    place = place_of(line)
    return str(place) if place is not None else ""


def render_position(line: CodeLine | None) -> str:
    """Format file and line number; empty if the line is unknown."""
    return f"{show_file(line.file)}:{line.line}" if line is not None and line.file else ""


def render_call(entry: Collective) -> str:
    """Format a collective and its line, such as ``all_reduce, train.py:3``."""
    return f"{describe_shortly(entry)}, {render_position(entry.line) or 'which no line of the program calls'}"


def render_death(rank: RankSnapshot | None) -> str:
    """Return a clause that names the signal that ended the rank; empty if none did."""
    return f", died of {rank.process.signal_name}" if rank is not None and rank.process.signal_name else ""


_ITS = re.compile(r"\bits\b")
_PLURALS = {
    "is": "are",
    "has": "have",
    "does": "do",
    "waits": "wait",
    "compiles": "compile",
    "leaves": "leave",
    "makes": "make",
    "closed": "closed",
}


def ranks_do(ranks: Collection[int], words: str, max_chars: int = 60) -> str:
    """Format ranks with a clause that begins with a singular verb, such as ``has returned``."""
    return f"{render_ranks(ranks, max_chars=max_chars)} {_conjugate(words, len(ranks))}"


def _conjugate(words: str, num: int) -> str:
    verb, blank, rest = words.partition(" ")
    if num == 1 or verb not in _PLURALS:  # such as the text of an error, or names of parameters
        return words
    return f"{_PLURALS[verb]}{blank}{_ITS.sub('their', rest)}"


def merge_rows(rows: Iterable[tuple[int, str, str]]) -> list[Row]:
    """Merge ranks that do the same at the same place into one row; rows with the most ranks come first."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, what, where in rows:
        ranks.setdefault((what, where), []).append(rank)
    ordered = sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1][0]))
    return [(render_ranks(each, max_chars=40), _conjugate(what, len(each)), where) for (what, where), each in ordered]


def rows_of(entries: Mapping[int, Collective]) -> list[tuple[int, str, str]]:
    """Return a row for the collective of each rank."""
    return [(rank, describe(entry), render_place(entry.line)) for rank, entry in sorted(entries.items())]


def render_table(rows: Iterable[tuple[int, str, str]]) -> tuple[str, ...]:
    """Format rows, each with one rank, as aligned lines."""
    return lay_out(merge_rows(rows))


def lay_out(rows: Sequence[Row]) -> tuple[str, ...]:
    """Format rows as aligned lines, at most eight."""
    shown = rows[:_MAX_ROWS]
    first = max((len(row[0]) for row in shown), default=0)
    second = max((len(row[1]) for row in shown if len(row[1]) <= _MAX_WHAT_CHARS), default=0)
    lines = [f"{ranks:<{first}}  {what:<{second}}   {where}".rstrip() for ranks, what, where in shown]
    if len(rows) > len(shown):
        lines.append(f"and {len(rows) - len(shown)} more lines like these")
    return tuple(lines)
