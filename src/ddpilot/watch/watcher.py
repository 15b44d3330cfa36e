# SPDX-License-Identifier: Apache-2.0
"""Goes along with a launch: gives its ranks a folder to record in, observes them, and ends the launch if need be."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ddpilot.errors import RankError, WatchError
from ddpilot.findings.finding import Finding
from ddpilot.findings.sequence import Findings
from ddpilot.launching.companion import Carrier, RankState
from ddpilot.record.hook import HOOK, RING_DIR_VARIABLE
from ddpilot.watch import folders
from ddpilot.watch.deaths import OF_ENDS
from ddpilot.watch.enabling import GUARD_HOOK
from ddpilot.watch.exchange import Exchange
from ddpilot.watch.gathering import RankFacts
from ddpilot.watch.known import find_known_error, is_explained
from ddpilot.watch.observer import Observer
from ddpilot.watch.options import WatchOptions
from ddpilot.watch.report import Report
from ddpilot.watch.view import ErrorView, ProcessView

NOTHING: Mapping[str, str] = MappingProxyType({})


class Watcher:
    """A `Companion` of a launch of `world_size` ranks, of which `ranks` are of this node.

    `carrier` leads to the other nodes; None where there are none, or where they are not asked. Where no folder can be
    made nothing is watched, and one line says so.
    """

    def __init__(
        self,
        options: WatchOptions,
        name: str,
        world_size: int,
        ranks: tuple[int, ...] = (),
        carrier: Carrier | None = None,
        others: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._options = options
        self._name = name
        self._others = others
        self._exchange = Exchange(carrier, ranks) if carrier is not None else None
        self._ranks: Sequence[RankState] = ()
        self._lines: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self._error: WatchError | None = None
        self._since_ns = 0
        self._observer: Observer | None = None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        os.set_blocking(self._reader, False)
        self.hooks: tuple[str, ...] = ()
        self.variables: Mapping[str, str] = {}
        self._folder: Path | None = None
        try:
            self._folder, self._about = folders.make_job_folder(name, world_size, ranks)
        except OSError as error:
            self._say(f"this job is not watched: its folder cannot be made ({error})")
            return
        self.hooks = (HOOK, GUARD_HOOK) if options.guard else (HOOK,)
        self.variables = {RING_DIR_VARIABLE: str(self._folder)}

    @property
    def fd(self) -> int:
        """Becomes readable when there is something for `take`."""
        return self._reader

    @property
    def folder(self) -> Path | None:
        """Of the job; None where none could be made."""
        return self._folder

    def begin(
        self, ranks: Sequence[RankState], sources: Mapping[str, str] = NOTHING, *, is_paused: bool = False
    ) -> None:
        """The ranks are being started. `sources`: the user's texts that lie in no file, by name.

        `is_paused`: nobody looks before `resume`.
        """
        self._ranks = ranks
        if self._folder is None:
            return
        self._observer = Observer(
            self._folder,
            self._about.world_size,
            facts=self._facts,
            tell=self._hear,
            options=self._options,
            name=self._name,
            ranks=self._about.ranks,
            others=self._others,
            exchange=self._exchange,
        )
        self._observer.add_sources(sources)
        self._observer.start(is_paused=is_paused)

    def resume(self, name: str, since_ns: int, sources: Mapping[str, str] = NOTHING) -> None:
        """Look again, at what is newer than `since_ns` and has this name; what was said before may be said again."""

        def begin() -> None:
            self._name, self._since_ns, self._error = name, since_ns, None
            # What the last look at an earlier cell has found comes too late to be of use.
            for text, is_of_cell in [self._lines.get_nowait() for _ in range(self._lines.qsize())]:
                if not is_of_cell:
                    self._lines.put((text, is_of_cell))

        if self._observer is not None:
            self._observer.add_sources(sources)
            self._observer.resume(since_ns, begin)

    def pause(self) -> None:
        """Look no more until `resume`."""
        if self._observer is not None:
            self._observer.pause()

    def take(self, note: Callable[[str], None]) -> WatchError | None:
        """Show what there is to say by `note`; the error that the launch is to end with, else None."""
        with suppress(BlockingIOError):
            os.read(self._reader, 4096)
        while not self._lines.empty():
            note(self._lines.get_nowait()[0])
        return self._error

    def explain(self, error: RankError) -> None:
        """Add to `error` what was found; where the rank ended by itself, only what came before that."""
        if self._observer is None:
            return
        failed = next((each for each in self._ranks if each.rank == error.rank), None)
        is_own = failed is not None and _ended_by_itself(failed)
        if not is_own:
            self._observer.await_others()
        try:
            report = self._observer.report()
        except Exception as fault:  # noqa: BLE001 - the error matters more
            self._say(f"what was recorded could not be read: {type(fault).__name__}: {fault}")
            return
        findings = [each for each in report.findings if not (is_own and _is_of_end(each))]
        view = facts_of(failed).error if failed is not None else None
        known = find_known_error(failed.rank, view, error.last_lines) if failed is not None else None
        if known is not None and not is_explained(known, findings):
            findings.insert(0, known)
        error.findings = Findings(findings)

    def finish(self, note: Callable[[str], None]) -> WatchError | None:
        """The ranks have ended well: look once more, and `note` what there is; an error where that is one."""
        if self._observer is not None:
            self._observer.stop()
            self._observer.finish()
        return self.take(note)

    def end(self, is_clean: bool) -> None:
        """The launch is over: the folder goes after a clean end, else it stays for `ddpilot watch`."""
        if self._observer is not None:
            self._observer.stop()
        if self._folder is not None:
            folders.close_job(self._folder, self._about, is_clean=is_clean)
        os.close(self._reader)
        os.close(self._writer)

    def _facts(self) -> dict[int, RankFacts]:
        known = [each for each in self._ranks if each.pid is not None or each.exited is not None]
        return {each.rank: facts_of(each, self._since_ns) for each in known}

    def _hear(self, report: Report) -> None:
        for line in report.notes:
            self._say(line)
        for line in report.status:
            self._say(line, is_of_cell=True)
        # Who started the ranks tells of one that failed, with what was seen: `explain`.
        findings = Findings(each for each in report.findings if each.code != "DDP209")
        if findings:
            self._act(replace(report, findings=findings))
        self._wake()

    def _act(self, report: Report) -> None:
        action = self._options.action()
        if action == "stop" and any(finding.severity == "error" for finding in report.findings):
            self._error = self._error or make_error(self._name, report)
            return
        # Where a rank has failed, the error that comes of it holds the findings.
        shown = [each for each in report.findings if each.severity != "error" or not self._has_failed()]
        if shown:
            self._say(str(Findings(shown)), is_of_cell=True)
        if not isinstance(action, str) and "stop" in [self._call_back(action, each) for each in report.findings]:
            self._error = self._error or make_error(self._name, report)

    def _has_failed(self) -> bool:
        facts = self._facts().values()
        return any(each.error is not None or (each.process.state == "ended" and not each.returned) for each in facts)

    def _call_back(self, action: Callable[[Finding], object], finding: Finding) -> object:
        try:
            return action(finding)
        except Exception as error:  # noqa: BLE001 - the user's own function: said, and the job goes on
            self._say(f"`on_finding` raised {type(error).__name__}: {error}")
            return None

    def _say(self, text: str, *, is_of_cell: bool = False) -> None:
        self._lines.put((text, is_of_cell))
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._writer, b"w")


def facts_of(rank: RankState, since_ns: int = 0) -> RankFacts:
    """What is known of `rank`, which has or had a process; an end before `since_ns` is no news."""
    exited, raised = rank.exited, rank.raised
    process = ProcessView(pid=rank.pid or 0, state="running")
    if exited is not None and exited.time_s * 1e9 < since_ns:
        process = replace(process, state="unknown")
    elif exited is not None:
        process = replace(
            process,
            state="ended",
            exitcode=exited.exitcode,
            signal_name=exited.signal_name,
            ended_ns=int(exited.time_s * 1e9),
        )
    error = (
        None
        if raised is None
        else ErrorView(type_name=raised.type_name, message=raised.message, traceback=raised.traceback)
    )
    return RankFacts(process=process, error=error, returned=rank.has_returned)


def make_error(name: str, report: Report) -> WatchError:
    """The error that ends the job because of what `report` says."""
    first = next((each for each in report.findings if each.severity == "error"), report.findings[0])
    return WatchError(
        f"running `{name}`",
        found=f"{first.name} ({first.code}): {first.summary}",
        fix=f"`ddpilot watch {report.job}` shows the report again",
        rank=first.ranks[0] if len(first.ranks) == 1 else None,
        findings=report.findings,
    )


def _ended_by_itself(rank: RankState) -> bool:
    """By an exception that is no consequence, or by an exit code of its own: the error says it all."""
    if rank.raised is not None:
        return not rank.raised.is_victim
    return rank.exited is not None and rank.exited.signal_name is None


def _is_of_end(finding: Finding) -> bool:
    return finding.code in OF_ENDS
