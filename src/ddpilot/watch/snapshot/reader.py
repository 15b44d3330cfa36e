# SPDX-License-Identifier: Apache-2.0
"""Build a snapshot of a job from the files in its folder and the state of its processes."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from ddpilot.errors import RecordError
from ddpilot.findings.text import render_ranks
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.hook import journal_path, ring_path
from ddpilot.record.journal import Entry
from ddpilot.watch.snapshot.files import (
    JournalFollower,
    RingFollower,
    StackSource,
    passed_by_all,
    read_stack,
    take_stacks,
)
from ddpilot.watch.snapshot.model import JobSnapshot, ProcessState, PythonStack, RankSnapshot
from ddpilot.watch.snapshot.stacks import SUBPROCESS, passes

_NUM_KEPT = 256
"""Collectives of each rank that are kept although all ranks have passed them."""


class SnapshotReader:
    """Reads the state of `ranks` of a job whose rings are in `folder`.

    `stacks`: returns the stacks of ranks that run on other machines; None if the processes are on this one.
    """

    def __init__(
        self, folder: Path, world_size: int, ranks: Sequence[int], name: str, stacks: StackSource | None = None
    ) -> None:
        self._remote_stacks = stacks
        self._folder = folder
        self._world_size = world_size
        self._name = name
        self._readers = {rank: RingFollower(ring_path(folder, rank)) for rank in ranks}
        self._journals = {rank: JournalFollower(journal_path(folder, rank)) for rank in ranks}
        self._away: set[int] = set()
        self._unread: dict[int, tuple[Entry, ...]] = {}
        self._stacks: dict[int, PythonStack] = {}
        self._num_begun: dict[int, int] = {}
        self._complained: set[tuple[int, str]] = set()
        self.sources: dict[str, str] = {}
        """Source texts that are not in a file, such as cells, by the file name that their lines have."""

    def take_entries(self) -> dict[int, tuple[Entry, ...]]:
        """Return by rank what `read` and `read_journals` found in guard's journals since the last call."""
        found, self._unread = self._unread, {}
        return found

    def read_journals(self) -> None:
        """Read what guard noted since the last call. `read` calls this too."""
        for rank, journal in self._journals.items():
            entries = () if rank in self._away else journal.read()
            if entries:
                self._unread[rank] = (*self._unread.get(rank, ()), *entries)

    def complaints(self) -> list[str]:
        """Return lines about files of ranks that can no longer be read, with the reason; each is returned once."""
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
        """Read everything the ring of `rank` holds, which takes milliseconds; None if it cannot be read."""
        try:
            return read_ring(ring_path(self._folder, rank))
        except (RecordError, OSError):
            return None

    def read(self, facts: Mapping[int, RankSnapshot], since_ns: int = 0) -> JobSnapshot:
        """Return the current state of the job.

        `facts`: what the process that started a rank knows about it, beyond the rank's own records; by rank, may
        include ranks that record nothing.
        """
        self._away = {rank for rank, each in facts.items() if each.is_away}
        self.read_journals()
        present = [(rank, reader) for rank, reader in self._readers.items() if rank not in self._away]
        logs = {rank: log for rank, reader in present if (log := reader.read()) is not None}
        now_ns = time.monotonic_ns()
        self._stacks = {rank: stack for rank, stack in self._stacks.items() if stack.taken_ns >= since_ns}
        passed = passed_by_all(logs.values())
        for reader in self._readers.values():
            reader.forget(passed, now_ns, _NUM_KEPT)
        return JobSnapshot(
            world_size=self._world_size,
            ranks={
                rank: self._read_rank(rank, logs.get(rank), facts.get(rank))
                for rank in sorted({*self._readers, *facts})
            },
            now_ns=now_ns,
            name=self._name,
            since_ns=since_ns,
            sources=dict(self.sources),
        )

    def _read_rank(self, rank: int, log: RankLog | None, facts: RankSnapshot | None) -> RankSnapshot:
        if log is not None and self._num_begun.get(rank) != log.num_begun:
            self._stacks.pop(rank, None)  # the rank has moved since then
            self._num_begun[rank] = log.num_begun
        if facts is None:
            process = read_process_state(log.pid, log.host) if log is not None else ProcessState(pid=0)
            facts = RankSnapshot(rank=rank, process=process)
        elif facts.process.state == "running" and self._remote_stacks is None:
            # Its parent decides whether it is running: a process is gone before its exit status is known.
            facts = replace(facts, process=replace(read_process_state(facts.process.pid), state="running"))
        journal = tuple(self._journals[rank].held) if rank in self._journals else ()
        return replace(facts, log=log, journal=journal, stack=self._stacks.get(rank))

    def add_stacks(self, job: JobSnapshot, ranks: Sequence[int]) -> JobSnapshot:
        """Return `job` with the current stacks of `ranks`, as far as these respond, within 2 s."""
        if self._remote_stacks is not None:
            self._stacks |= self._remote_stacks(ranks)
            return self._with_stacks(job)
        pids = {rank: job.ranks[rank].process.pid for rank in ranks if job.ranks[rank].process.state == "running"}
        taken = take_stacks(self._folder, pids)
        self._stacks |= {rank: _with_child(stack, pids[rank]) for rank, stack in taken.items()}
        return self._with_stacks(job)

    def add_last_stacks(self, job: JobSnapshot) -> JobSnapshot:
        """Return `job` with the stacks that the ranks wrote last, including those of ranks that have ended."""
        for rank, each in job.ranks.items():
            pid = each.log.pid if each.log is not None else each.process.pid
            stack = read_stack(self._folder, rank)
            if stack is not None:
                self._stacks[rank] = _with_child(stack, pid)
        return self._with_stacks(job)

    def _with_stacks(self, job: JobSnapshot) -> JobSnapshot:
        ranks = {rank: replace(each, stack=self._stacks.get(rank)) for rank, each in job.ranks.items()}
        return replace(job, ranks=ranks)


def _with_child(stack: PythonStack, pid: int) -> PythonStack:
    """Return `stack` of the process `pid`, with the child process that it waits for, if any."""
    return stack if passes(stack, SUBPROCESS) is None else replace(stack, child=name_child(pid))


_HOST = platform.node()


def read_process_state(pid: int, host: str = _HOST) -> ProcessState:
    """Return the state of process `pid`: running, ended (exit status unknown), or unknown on a different host."""
    if host != _HOST:
        return ProcessState(pid=pid, host=host, state="unknown")
    try:
        # The first field after the process name, which may contain any character.
        os_state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        state = "ended" if Path("/proc/self/stat").exists() else "unknown"
        return ProcessState(pid=pid, host=_HOST, state=state)  # type: ignore[arg-type]
    return ProcessState(pid=pid, host=_HOST, state="ended" if os_state in "ZX" else "running", os_state=os_state)


def name_child(pid: int) -> str:
    """Return the newest child process of `pid`, such as ``rsync (pid 4711)``; empty if there is none.

    Copies of the process itself, such as DataLoader workers, are not included.
    """
    found = []
    try:
        parent = psutil.Process(pid)
        own = parent.cmdline()
        for child in parent.children():
            with suppress(psutil.Error):  # it has ended in the meantime
                words = child.cmdline()
                if words and words != own and not any(word.startswith("from multiprocessing") for word in words):
                    found.append((child.create_time(), f"{child.name()} (pid {child.pid})"))
    except psutil.Error:
        return ""
    return max(found)[1] if found else ""
