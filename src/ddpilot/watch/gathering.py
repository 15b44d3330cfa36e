# SPDX-License-Identifier: Apache-2.0
"""From a job's folder and what is known of its processes to a view of the job."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddpilot.errors import RecordError
from ddpilot.findings.words import render_ranks
from ddpilot.record.hook import journal_path, ring_path
from ddpilot.record.journal import Entry
from ddpilot.record.log import RankLog
from ddpilot.record.reading import read_ring
from ddpilot.watch.absent import SUBPROCESS
from ddpilot.watch.journals import JournalReader
from ddpilot.watch.processes import look_at, name_child
from ddpilot.watch.rings import LogReader, passed_by_all
from ddpilot.watch.stack_files import read_stack, take_stacks
from ddpilot.watch.stacks import passes
from ddpilot.watch.view import ErrorView, JobView, ProcessView, RankView, StackView

_NUM_KEPT = 256
"""Collectives of each rank that stay in view although all ranks have passed them."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What who started a rank knows of it, beyond what it recorded itself."""

    process: ProcessView = field(default_factory=lambda: ProcessView(pid=0))
    error: ErrorView | None = None
    returned: bool = False
    is_away: bool = False
    """True if its process has ended and another one may come: what it has left says nothing of the job."""


class Gatherer:
    """Looks at the ranks `ranks` of a job whose rings are in `folder`."""

    def __init__(self, folder: Path, world_size: int, ranks: Sequence[int], name: str) -> None:
        self._folder = folder
        self._world_size = world_size
        self._name = name
        self._readers = {rank: LogReader(ring_path(folder, rank)) for rank in ranks}
        self._journals = {rank: JournalReader(journal_path(folder, rank)) for rank in ranks}
        self._away: set[int] = set()
        self._unread: dict[int, tuple[Entry, ...]] = {}
        self._stacks: dict[int, StackView] = {}
        self._num_begun: dict[int, int] = {}
        self._complained: set[tuple[int, str]] = set()
        self.sources: dict[str, str] = {}
        """Texts of the user's that lie in no file, by the name that lines have."""
        self.logs: dict[int, RankLog] = {}
        """By rank: what the rings held at the last look."""

    def read_entries(self) -> dict[int, tuple[Entry, ...]]:
        """By rank: what guard noted since the last call."""
        self._read_journals()
        found, self._unread = self._unread, {}
        return found

    def _read_journals(self) -> None:
        for rank, journal in self._journals.items():
            entries = () if rank in self._away else journal.read()
            if entries:
                self._unread[rank] = (*self._unread.get(rank, ()), *entries)

    def complaints(self) -> list[str]:
        """Which files of ranks cannot be read any more, and why: each once."""
        found: dict[tuple[str, str], list[int]] = {}
        for rank, reader in self._readers.items():
            journal = self._journals[rank]
            what, fault = ("recording", reader.fault) if reader.fault else ("notes of guard", journal.fault)
            if fault and (rank, what) not in self._complained:
                self._complained.add((rank, what))
                found.setdefault((what, fault), []).append(rank)
        return [
            f"the {what} of {render_ranks(ranks)} in {self._folder} cannot be read: {fault}"
            for (what, fault), ranks in found.items()
        ]

    def full_log(self, rank: int) -> RankLog | None:
        """All that the ring of `rank` holds, which takes milliseconds; None where it cannot be read."""
        try:
            return read_ring(ring_path(self._folder, rank))
        except (RecordError, OSError):
            return None

    def gather(self, facts: Mapping[int, RankFacts], since_ns: int = 0) -> JobView:
        """The job as it is now. `facts`: by rank, also of ranks that record nothing."""
        self._away = {rank for rank, each in facts.items() if each.is_away}
        self._read_journals()
        present = [(rank, reader) for rank, reader in self._readers.items() if rank not in self._away]
        self.logs = logs = {rank: log for rank, reader in present if (log := reader.read()) is not None}
        now_ns = time.monotonic_ns()
        self._stacks = {rank: stack for rank, stack in self._stacks.items() if stack.taken_ns >= since_ns}
        passed = passed_by_all(logs.values())
        for reader in self._readers.values():
            reader.forget(passed, now_ns, _NUM_KEPT)
        return JobView(
            world_size=self._world_size,
            ranks={
                rank: self._view(rank, logs.get(rank), facts.get(rank)) for rank in sorted({*self._readers, *facts})
            },
            now_ns=now_ns,
            name=self._name,
            since_ns=since_ns,
            sources=dict(self.sources),
        )

    def _view(self, rank: int, log: RankLog | None, facts: RankFacts | None) -> RankView:
        if log is not None and self._num_begun.get(rank) != log.num_begun:
            self._stacks.pop(rank, None)  # it has gone on since then
            self._num_begun[rank] = log.num_begun
        if facts is None:
            facts = RankFacts(process=look_at(log.pid, log.host)) if log is not None else RankFacts()
        elif facts.process.state == "running":
            # Whether it runs is for its parent to say: a process is gone before anybody knows of what.
            facts = replace(facts, process=replace(look_at(facts.process.pid), state="running"))
        return RankView(
            rank=rank,
            log=log,
            journal=tuple(self._journals[rank].held) if rank in self._journals else (),
            process=facts.process,
            stack=self._stacks.get(rank),
            error=facts.error,
            returned=facts.returned,
        )

    def add_stacks(self, view: JobView, ranks: Sequence[int]) -> JobView:
        """`view` with the stacks of `ranks` as they are now, as far as they answer within 0.3 s."""
        pids = {rank: view.ranks[rank].process.pid for rank in ranks if view.ranks[rank].process.state == "running"}
        taken = take_stacks(self._folder, pids)
        self._stacks |= {rank: _with_child(stack, pids[rank]) for rank, stack in taken.items()}
        return self._with_stacks(view)

    def add_last_stacks(self, view: JobView) -> JobView:
        """`view` with the stacks that the ranks were asked for last, also of those that are gone."""
        for rank, each in view.ranks.items():
            pid = each.log.pid if each.log is not None else each.process.pid
            stack = read_stack(self._folder, rank, pid)
            if stack is not None:
                self._stacks[rank] = _with_child(stack, pid)
        return self._with_stacks(view)

    def _with_stacks(self, view: JobView) -> JobView:
        ranks = {rank: replace(each, stack=self._stacks.get(rank)) for rank, each in view.ranks.items()}
        return replace(view, ranks=ranks)


def _with_child(stack: StackView, pid: int) -> StackView:
    """`stack` of the process `pid`, with the child that it waits for if it does."""
    return stack if passes(stack, SUBPROCESS) is None else replace(stack, child=name_child(pid))
