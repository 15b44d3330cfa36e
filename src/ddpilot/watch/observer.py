# SPDX-License-Identifier: Apache-2.0
"""Observe a job from outside its ranks: poll their files four times a second and report new findings."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.registry import RULES_OF_SEVERAL_RANKS, RuleRunner, rules_for
from ddpilot.record.journal import Entry
from ddpilot.watch.analysis import Analysis, analyze, render_end
from ddpilot.watch.nodes.exchange import Exchange
from ddpilot.watch.nodes.shared_rules import SharedRules
from ddpilot.watch.options import WatchOptions
from ddpilot.watch.report import Report, ReportHistory, label_cells, newest, rename, rename_in
from ddpilot.watch.snapshot.files import StackSource
from ddpilot.watch.snapshot.model import JobSnapshot, RankSnapshot
from ddpilot.watch.snapshot.reader import SnapshotReader

INTERVAL_S = 0.25
"""Interval between two polls of the ranks' files."""

_NUM_SOURCES = 200
"""Number of the newest cell sources that are kept to show their lines."""

_EARLIER_NS = 1_000_000_000
"""A snapshot or a stack of this age shows whether a rank has moved since."""

_ANSWER_S = 1.25
"""How long a failed launch waits for digests of other nodes, which poll every 0.25 s and answer via a store."""

_PAUSE_S = 0.05

_MAX_STACKS = 64
"""Maximum number of stacks taken per poll; each one takes a signal to a rank and a file to read."""


class Observer:
    """Observes the job whose ranks record in `folder`, in its own thread between `start` and `stop`.

    `facts` returns the present facts about the ranks. `notify` is called in the observer's thread with a report of new
    findings. `ranks`: those of this node (default: all of `world_size`). `exchange`: the exchange with the
    observers of other nodes. `history`: that of an earlier observer of the same job, whose findings are not reported
    again. An error in the observer is reported once, as a note of a report, and ends the observation but not the job.
    """

    def __init__(
        self,
        folder: Path,
        world_size: int,
        *,
        facts: Callable[[], Mapping[int, RankSnapshot]],
        notify: Callable[[Report], None],
        options: WatchOptions,
        name: str = "",
        ranks: Sequence[int] | None = None,
        exchange: Exchange | None = None,
        history: ReportHistory | None = None,
        stacks: StackSource | None = None,
    ) -> None:
        self._folder = folder
        self._facts = facts
        self._notify = notify
        self._options = options
        seen = range(world_size) if ranks is None else ranks
        self._reader = SnapshotReader(folder, world_size, seen, name, stacks)
        self._empty = Report(job=folder.name, name=name, world_size=world_size)
        rules = rules_for(world_size, seen)
        self._rules = RuleRunner(world_size, log=self._reader.full_log, sources=self._sources, rules=rules)
        self._history = history or ReportHistory(options.stall_warn_s)
        self._exchange = exchange
        self._shared_rules = (
            SharedRules(exchange.mailbox, self._make_shared_rules_runner) if exchange is not None else None
        )
        self._snapshots: deque[JobSnapshot] = deque()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpilot-watch", daemon=True)
        self._since_ns = 0
        self._is_active = self._has_given_up = False
        self._is_wanted = threading.Event()
        self._is_settled = False
        """True if guard has noted nothing since the rules were last paused after a cell that ended well."""

    def _make_shared_rules_runner(self) -> RuleRunner:
        """Return the rules that compare ranks, for the ranks of all nodes."""
        log, sources = self._reader.full_log, self._sources
        rules = RULES_OF_SEVERAL_RANKS
        return RuleRunner(self._empty.world_size, log=log, sources=sources, rules=rules, has_all_logs=False)

    def start(self, *, is_paused: bool = False) -> None:
        """Start to observe, or with `is_paused` wait for `resume`."""
        self._is_active = not is_paused
        if not is_paused:
            self._is_wanted.set()
        self._thread.start()

    def add_sources(self, sources: Mapping[str, str]) -> None:
        """Add sources that are not in a file, such as cells, by name; the newest 200 are kept."""
        with self._lock:
            held = {**self._reader.sources, **sources}
            self._reader.sources = {name: held[name] for name in list(held)[-_NUM_SOURCES:]}

    def _sources(self) -> Mapping[str, str]:
        return self._reader.sources

    def pause(self, *, reports: bool) -> None:
        """Stop observing until `resume`. What guard has noted so far is reported, or dropped if `reports` is False.

        Waits for a poll that is in progress.
        """
        with self._lock:
            self._is_active = False
            if self._has_given_up:
                return
            try:
                self._read_rest(reports=reports)
            except Exception as error:  # noqa: BLE001 - reported once; must not fail the cell
                self._give_up(error)

    def _read_rest(self, *, reports: bool) -> None:
        self._reader.read_journals()
        entries, now_ns = self._reader.take_entries(), time.monotonic_ns()
        if reports and self._is_settled and not entries:
            return
        found = self._judge(entries, now_ns) if entries else []
        found += self._with_cell_labels(self._rules.pause(now_ns, is_ok=reports))
        self._is_settled = reports
        news = self._history.new_findings(found) if reports else []
        if news:
            job, _ = self._poll()
            report = self._compose(job, Analysis(findings=Findings()), news)
            self._save(replace(report, findings=Findings(self._history.findings)))
            self._notify(report)

    def resume(self, since_ns: int, begin: Callable[[], None]) -> None:
        """Observe again, from a clean state, everything newer than `since_ns`.

        `begin` is called first, while nothing can be reported.
        """
        with self._lock:
            begin()
            self._since_ns = since_ns
            self._history = self._history.next_cell()
            self._snapshots.clear()
            self._is_active = True
        self._is_wanted.set()

    def stop(self) -> None:
        """Stop observing; waits at most 5 s for a poll that is in progress."""
        self._stopped.set()
        self._is_wanted.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def await_others(self) -> None:
        """Request digests of the other nodes and wait for them, for at most 1.25 s."""
        exchange, since_ns = self._exchange, time.monotonic_ns()
        while exchange is not None and time.monotonic_ns() - since_ns < _ANSWER_S * 1e9:
            with self._lock:
                if not self._thread.is_alive() or exchange.has_received_since(since_ns):
                    return
            time.sleep(_PAUSE_S)

    def report(self) -> Report:
        """Return and save a report with all findings so far. Thread-safe, also after `stop`."""
        with self._lock:
            job, analysis = self._poll()
            self._history.new_findings(self._judge(self._reader.take_entries(), job.now_ns))
            report = self._compose(job, analysis, [*self._history.findings, *analysis.findings])
            self._save(report)
        return report

    def finish(self, *, is_caused: bool = False) -> None:
        """Poll once more after the ranks have ended and report new findings. Call it after `stop`.

        `is_caused`: the ranks were terminated because of a finding, so that their ends are not reported.
        """
        if self._has_given_up:
            return
        try:
            with self._lock:
                self._step(is_last=True, is_caused=is_caused)
        except Exception as error:  # noqa: BLE001 - reported; must not fail the job
            self._give_up(error)

    def send_final(self) -> None:
        """Send the other nodes the final state of the ranks here. Call it after `finish`."""
        if self._exchange is not None and not self._has_given_up:
            with self._lock:
                self._exchange.send_final(self._reader.read(self._present_facts(), self._since_ns))

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self._is_wanted.wait()
            if self._stopped.is_set():
                return
            try:
                with self._lock:
                    if self._is_active:
                        self._step()
                    else:
                        self._is_wanted.clear()
            except Exception as error:  # noqa: BLE001 - reported once; must not fail the job
                self._give_up(error)
                return

    def _give_up(self, error: Exception) -> None:
        self._has_given_up = True
        self._stopped.set()
        text = f"the observer failed, and the job continues: {type(error).__name__}: {error}"
        self._notify(replace(self._empty, notes=(text,)))

    def _step(self, *, is_last: bool = False, is_caused: bool = False) -> None:
        job, analysis = self._poll()
        if is_caused:
            analysis = Analysis(findings=Findings())
        may_know_more = self._exchange is not None and self._exchange.is_waiting(job.now_ns)
        # A rank may have died because of ranks on other nodes, or have been terminated together with the whole job.
        is_unsure = may_know_more or (not is_last and self._has_just_ended(job))
        known = [each for each in analysis.findings if not (is_unsure and each.code == "DDP209")]
        found = [*self._judge(self._reader.take_entries(), job.now_ns, is_last=is_last), *known]
        found += self._with_cell_labels(self._rules.finish(job.now_ns)) if is_last else ()
        news = self._history.new_findings(found)
        status = () if may_know_more else self._history.new_status(analysis, time.monotonic())
        if not (news or status):
            if self._history.once(analysis.end):
                self._save(self._compose(job, analysis, self._history.findings))
            return
        report = self._compose(job, analysis, news)
        self._save(replace(report, findings=Findings(self._history.findings), status=analysis.status))
        self._notify(replace(report, status=status))

    def _has_just_ended(self, job: JobSnapshot) -> bool:
        """True if a rank has ended since the previous poll: other ranks that end with it may still be running."""
        before = self._snapshots[-2].ranks if len(self._snapshots) > 1 else {}
        return any(
            each.process.state == "ended" and rank in before and before[rank].process.state == "running"
            for rank, each in job.ranks.items()
        )

    def _judge(self, entries: Mapping[int, tuple[Entry, ...]], now_ns: int, *, is_last: bool = False) -> list[Finding]:
        self._is_settled = self._is_settled and not entries
        found = self._rules.feed(entries, now_ns)
        if self._shared_rules is not None:
            found += self._shared_rules.feed(entries, now_ns, is_last=is_last)
        for fault in (*self._rules.faults, *(self._shared_rules.faults if self._shared_rules is not None else ())):
            self._note(fault)
        return self._with_cell_labels(found)

    def _with_cell_labels(self, findings: Iterable[Finding]) -> list[Finding]:
        return [rename_in(finding, self._labels()) for finding in findings]

    def _labels(self) -> Mapping[str, str]:
        return label_cells(self._reader.sources)

    def _poll(self) -> tuple[JobSnapshot, Analysis]:
        here = self._reader.read(self._present_facts(), self._since_ns)
        earlier = self._find_earlier(here.now_ns)
        job = self._widen(here)
        analysis = analyze(job, earlier, stall_warn_s=self._options.stall_warn_s)
        needs_stacks = [rank for rank in analysis.needs_stacks if rank in here.ranks]
        if needs_stacks:
            here = self._reader.add_stacks(here, needs_stacks)
            job = self._widen(here)
            analysis = analyze(job, earlier, stall_warn_s=self._options.stall_warn_s)
        self._snapshots.append(job)
        if self._exchange is not None:
            self._exchange.send(here, analysis, self._with_stacks)
            for complaint in self._exchange.complaints(here.now_ns):
                self._note(complaint)
        for complaint in self._reader.complaints():
            self._note(f"{complaint}. Training continues with less information")
        status = tuple(rename(line, self._labels()) for line in analysis.status)
        return job, replace(analysis, findings=Findings(self._with_cell_labels(analysis.findings)), status=status)

    def _widen(self, here: JobSnapshot) -> JobSnapshot:
        return here if self._exchange is None else self._exchange.widen(here)

    def _with_stacks(self, here: JobSnapshot) -> JobSnapshot:
        stacks = {rank: each.stack for rank, each in here.ranks.items()}
        old = [rank for rank, each in stacks.items() if each is None or here.now_ns - each.taken_ns > _EARLIER_NS]
        return self._reader.add_stacks(here, old[:_MAX_STACKS]) if old else here

    def _present_facts(self) -> Mapping[int, RankSnapshot]:
        facts = self._facts()
        if self._is_active:
            return facts
        # Between two cells, a rank that has completed one may still take part in the next.
        return {rank: replace(each, returned=False) for rank, each in facts.items()}

    def _find_earlier(self, now_ns: int) -> JobSnapshot | None:
        """Return the newest snapshot that is at least one second old; it shows which ranks have moved."""
        while len(self._snapshots) > 1 and now_ns - self._snapshots[1].now_ns >= _EARLIER_NS:
            self._snapshots.popleft()
        return self._snapshots[0] if self._snapshots and now_ns - self._snapshots[0].now_ns >= _EARLIER_NS else None

    def _compose(self, job: JobSnapshot, analysis: Analysis, findings: Sequence[Finding]) -> Report:
        seen = {rank for rank, each in job.ranks.items() if each.log is not None}
        return replace(
            self._empty,
            findings=Findings(newest(findings)),
            status=analysis.status,
            unseen=tuple(rank for rank in range(job.world_size) if rank not in seen),
            notes=render_end(analysis, [*self._history.findings, *findings]),
            made_s=time.time(),
        )

    def _save(self, report: Report) -> None:
        try:
            report.save(self._folder)
        except OSError as error:
            self._note(f"the report cannot be saved: {error}")

    def _note(self, text: str) -> None:
        if self._history.once(text):
            self._notify(replace(self._empty, notes=(text,)))
