# SPDX-License-Identifier: Apache-2.0
"""Watch a launch: give its ranks a folder to record in, observe them, and end the launch on a proven error.

Errors that ranks raised and that the catalog knows become findings; `on_finding` is called in a separate thread.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ddpilot.errors import LaunchTimeoutError, RankError, WatchError
from ddpilot.findings.catalog import SHIP_ERROR, Entry, find_cause, find_known, fix_in_rank, make_finding
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.launching.first_failure import find_raised_line
from ddpilot.launching.observer import LaunchObserver, Mailbox, RankState
from ddpilot.module_names import GUARD_HOOK, RECORD_HOOK
from ddpilot.record.hook import RING_DIR_VARIABLE
from ddpilot.user_files import CodeLine, is_users_line
from ddpilot.watch import job_folder
from ddpilot.watch.explain.rank_exit import OF_ENDS, find_cause_of_end
from ddpilot.watch.nodes.exchange import Exchange
from ddpilot.watch.observer import Observer
from ddpilot.watch.options import FindingCallback, WatchOptions
from ddpilot.watch.report import Report, label_cells, rename_in
from ddpilot.watch.snapshot.files import StackSource
from ddpilot.watch.snapshot.model import ProcessState, RankException, RankSnapshot

NOTHING: Mapping[str, str] = MappingProxyType({})
_CALL_LIMIT_S = 5.0
"""How long a job or cell that has ended well waits for the user's `on_finding`."""
_ARRIVAL_S = 0.5
"""How long an error whose cause another rank shows waits until that rank is in the collective."""
_PAUSE_S = 0.02


class Watcher(LaunchObserver):
    """The observer of a launch of `world_size` ranks, of which `ranks` are on this node.

    `mailbox` connects to the other nodes; None if there are none or they are not consulted. If the job's folder cannot
    be created, the job is not watched, and one line reports it. `more_hooks`: hooks that ranks call after those of the
    watch. `stacks`: returns the stacks of ranks if they run on other machines, and their records are copied to the
    job's folder.
    """

    def __init__(
        self,
        options: WatchOptions,
        name: str,
        world_size: int,
        ranks: tuple[int, ...] = (),
        mailbox: Mailbox | None = None,
        *,
        more_hooks: tuple[str, ...] = (),
        stacks: StackSource | None = None,
    ) -> None:
        self._options = options
        self._stacks = stacks
        self._name = name
        self._exchange = Exchange(mailbox) if mailbox is not None else None
        self._ranks: Sequence[RankState] = ()
        self._lines: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self._error: WatchError | None = None
        self._num_resumed = 0
        self._callback = self._make_callback()
        self._since_ns = 0
        self._observer: Observer | None = None
        self._waking = threading.Lock()
        self._is_awake = self._is_over = False
        self._reader, self._writer = os.pipe()
        self.fd = self._reader
        self.hooks: tuple[str, ...] = ()
        self.variables: Mapping[str, str] = {}
        self.folder: Path | None = None
        """The job's folder; None if it could not be created."""
        try:
            self.folder, self._about = job_folder.make_job_folder(name, world_size, ranks)
        except OSError as error:
            self._print(f"this job is not watched: its folder cannot be created ({error})")
            return
        self.hooks = (RECORD_HOOK, *((GUARD_HOOK,) if options.guard else ()), *more_hooks)
        self.variables = {RING_DIR_VARIABLE: str(self.folder)}

    def begin(
        self, ranks: Sequence[RankState], sources: Mapping[str, str] = NOTHING, *, is_paused: bool = False
    ) -> None:
        """Begin to observe ranks that are being started. `sources`: by name, the user's sources that are not in a file.

        `is_paused`: do not poll before `resume`.
        """
        self._ranks = ranks
        if self.folder is None:
            return
        try:
            self._observer = Observer(
                self.folder,
                self._about.world_size,
                facts=self._facts,
                notify=self._receive,
                options=self._options,
                name=self._name,
                ranks=self._about.ranks,
                exchange=self._exchange,
                stacks=self._stacks,
            )
        except Exception as error:  # noqa: BLE001 - reported once, and the job runs
            self._print(f"this job is not watched: {type(error).__name__}: {error}")
            return
        self._observer.add_sources(sources)
        self._observer.start(is_paused=is_paused)

    def resume(self, name: str, since_ns: int, sources: Mapping[str, str] = NOTHING) -> None:
        """Observe again, as `name`, everything newer than `since_ns`; earlier findings may be reported again."""

        def begin() -> None:
            self._name, self._since_ns, self._error = name, since_ns, None
            self._num_resumed += 1
            self._callback = self._make_callback()
            # Lines about an earlier cell are dropped.
            for text, is_of_cell in [self._lines.get_nowait() for _ in range(self._lines.qsize())]:
                if not is_of_cell:
                    self._lines.put((text, is_of_cell))

        if self._observer is not None:
            self._observer.add_sources(sources)
            self._observer.resume(since_ns, begin)

    def pause(self, note: Callable[[str], None], *, is_ok: bool) -> WatchError | None:
        """Stop observing until `resume`, at the end of a cell.

        If the cell ended well (`is_ok`), guard's remaining findings are passed to `note`, and an error is returned if
        one of them requires it. For a cell that failed or was stopped, unread notes are dropped: ranks that were
        interrupted differ.
        """
        if self._observer is not None:
            self._observer.pause(reports=is_ok)
        if not is_ok:
            return None
        if self._callback is not None:
            self._callback.wait(_CALL_LIMIT_S)
        return self.take(note)

    def take(self, note: Callable[[str], None]) -> WatchError | None:
        """Pass pending output to `note`; return the error with which the launch is to end, if any."""
        with self._waking:
            if self._is_awake:
                os.read(self._reader, 1)
                self._is_awake = False
        while not self._lines.empty():
            note(self._lines.get_nowait()[0])
        return self._error

    def explain(self, error: RankError | LaunchTimeoutError) -> None:
        """Add the findings to `error`; if the rank failed on its own, without those about how ranks ended."""
        if self._observer is None:
            return
        if isinstance(error, LaunchTimeoutError):
            error.findings = self._find_all()
            return
        failed = next((each for each in self._ranks if each.rank == error.rank), None)
        is_own = failed is not None and _ended_by_itself(failed)
        if not is_own:
            self._observer.await_others()
        known = None
        if failed is not None:
            known = find_known_error(failed.rank, facts_of(failed).error, error.last_lines)
        if known is not None and known.place is not None:
            known = rename_in(known, label_cells([known.place.file]))
        found: Sequence[Finding] = find_with_cause(known, self._find_all, self._have_all_ended)
        adds_place = failed is not None and failed.raised is None  # an exception already shows its line
        findings = [
            each for each in found if not (is_own and each.code in OF_ENDS) or (adds_place and each.place is not None)
        ]
        found, findings = without_waits(found, known), without_waits(findings, known)
        if known is not None:
            error.fix = put_first(known, findings) or error.fix
        error.findings = Findings(findings, more=f"`ddpilot watch {self._about.id} -v`")
        is_victim = failed is not None and failed.raised is not None and failed.raised.is_victim
        cause = find_cause_of_end(found, failed.rank) if failed is not None and is_victim else None
        if cause is not None:
            # It lost its connection to other ranks: show why first, and the fix for that.
            error.found, error.fix = f"{cause.summary} ({cause.code}). So {error.found}", ""

    def finish(self, note: Callable[[str], None]) -> WatchError | None:
        """Poll once more after all ranks have ended well; pass output to `note` and return an error if there is one."""
        if self._observer is not None:
            self._observer.stop()
            self._observer.finish()
        if self._callback is not None:
            self._callback.wait(_CALL_LIMIT_S)
        return self.take(note)

    def end(self, is_clean: bool) -> None:
        """Close the watch after the launch; the folder is removed after a clean end, else kept for `ddpilot watch`."""
        if self._observer is not None:
            self._observer.stop()
        if self.folder is not None:
            job_folder.close_job(self.folder, self._about, is_clean=is_clean)
        with self._waking:
            self._is_over = True
            os.close(self._reader)
            os.close(self._writer)

    def _facts(self) -> dict[int, RankSnapshot]:
        is_remote = self._stacks is not None
        known = [each for each in self._ranks if is_remote or each.pid is not None or each.exited is not None]
        return {each.rank: facts_of(each, self._since_ns) for each in known}

    def _receive(self, report: Report) -> None:
        for line in report.notes:
            self._print(line)
        for line in report.status:
            self._print(line, is_of_cell=True)
        # The launcher reports the rank that failed, with the findings: see `explain`.
        findings = Findings(each for each in report.findings if each.code != "DDP209")
        if findings:
            self._act(replace(report, findings=findings))
        self._wake()

    def _act(self, report: Report) -> None:
        if self._options.action() == "stop" and any(finding.severity == "error" for finding in report.findings):
            self._error = self._error or make_error(self._name, report)
            return
        # If a rank has failed, the launcher's error holds the findings.
        facts = self._facts().values()
        has_failed = any(each.error or (each.process.state == "ended" and not each.returned) for each in facts)
        shown = [each for each in report.findings if each.severity != "error" or not has_failed]
        if shown:
            self._print(str(Findings(shown, more=report.more)), is_of_cell=True)
        if self._callback is not None:
            self._callback.call(report)

    def _make_callback(self) -> CallbackThread | None:
        action = self._options.action()
        number = self._num_resumed

        def stop(report: Report) -> None:
            if number == self._num_resumed:  # otherwise the cell it was called for has ended
                self._error = self._error or make_error(self._name, report)
                self._wake()

        return None if isinstance(action, str) else CallbackThread(action, stop=stop, say=self._print)

    def _have_all_ended(self) -> bool:
        return all(each.raised or each.exited or each.has_returned for each in self._ranks)

    def _find_all(self) -> Findings:
        """Return all current findings; empty if the records cannot be read, which is reported."""
        assert self._observer is not None
        try:
            report = self._observer.report()
            return Findings(report.findings, more=report.more)
        except Exception as fault:  # noqa: BLE001 - the error that ends the job matters more
            self._print(f"the recording could not be read: {type(fault).__name__}: {fault}")
            return Findings()

    def _print(self, text: str, *, is_of_cell: bool = False) -> None:
        self._lines.put((text, is_of_cell))
        self._wake()

    def _wake(self) -> None:
        # The user's function may return after the end.
        with self._waking:
            if not (self._is_awake or self._is_over):
                os.write(self._writer, b"w")
                self._is_awake = True


def facts_of(rank: RankState, since_ns: int = 0) -> RankSnapshot:
    """Return the facts about `rank`, which has or had a process; an end before `since_ns` is ignored."""
    exited, raised = rank.exited, rank.raised
    process = ProcessState(pid=rank.pid or 0, state="running")
    if exited is not None and exited.time_s * 1e9 < since_ns:
        process = replace(process, state="unknown")
    elif exited is not None:
        name, ended_ns = exited.signal_name, int(exited.time_s * 1e9)
        process = replace(process, state="ended", exitcode=exited.exitcode, signal_name=name, ended_ns=ended_ns)
    error = None
    if raised is not None:
        error = RankException(type_name=raised.type_name, message=raised.message, traceback=raised.traceback)
    return RankSnapshot(rank=rank.rank, process=process, error=error, returned=rank.has_returned)


def make_error(name: str, report: Report) -> WatchError:
    """Return the error that ends the job because of `report`."""
    first = next((each for each in report.findings if each.severity == "error"), report.findings[0])
    return WatchError(
        f"running `{name}`",
        found=f"{first.name} ({first.code}): {first.summary}",
        fix=f"`ddpilot watch {report.job}` shows the report again",
        rank=first.ranks[0] if len(first.ranks) == 1 else None,
        findings=Findings(report.findings, more=report.more),
    )


def _ended_by_itself(rank: RankState) -> bool:
    """True if the rank failed by its own exception or exit code, so that its error needs no further explanation."""
    if rank.raised is not None:
        return not rank.raised.is_victim
    return rank.exited is not None and rank.exited.signal_name is None


_FAULT_FRAME = re.compile(
    r'^  (?:File "(?P<file>[^"]+)"|(?P<cell>Cell In\[\d+\])), line (?P<line>\d+) in (?P<function>.+)$'
)
_NEXT_IN_CHAIN = re.compile(
    r"^(?:The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)$",
    re.MULTILINE,
)
_MAX_MESSAGE_CHARS = 200
_CONSEQUENCES_OF_DESYNC = frozenset({"DDP201", "DDP202", "DDP203", "DDP218", "DDP603"})
"""Pages of errors that gloo, NCCL and unpickling raise if ranks disagree; the messages do not name the cause."""
_OF_CONSTRUCTION = frozenset({"DDP301", "DDP302", "DDP303", "DDP304"})
"""Codes of models that differ between ranks: torch counts parameters frozen on one rank as missing there."""
_OF_CONNECTING = frozenset({"DDP103", "DDP104"})
"""Pages about why a rank could not reach the rendezvous: a port in use, a wrong address."""
_OF_WAITS = frozenset({"DDP208", "DDP209", "DDP215"})
"""Codes of findings about ranks that wait for a rank that could not reach the rendezvous."""


def find_known_error(rank: int, error: RankException | None, last_lines: Sequence[str] = ()) -> Finding | None:
    """Return the finding for how `rank` ended: by its exception, or else by the last lines of its output.

    None if no page matches, and for ddpilot's ShipError, whose message is more specific than its page.
    """
    if error is not None and error.type_name == SHIP_ERROR:
        return None
    message = f"{error.type_name}: {error.message}" if error is not None else ""
    traceback = error.traceback if error is not None else ""
    known = find_cause(message, last_lines)
    if not known:
        known, message, traceback = _find_in_chain(traceback)
    elif not known[0].matches(message):  # a child process of the rank, or C++ code, wrote the message
        message = next((line for line in reversed(last_lines) if known[0].matches(line)), "\n".join(last_lines))
    if not known:
        return None
    entry, text = known[0], " ".join(message.split())
    return make_finding(
        entry.code,
        ranks=(rank,),
        line=find_raised_line(traceback) or _find_crash_place(last_lines),
        evidence=(text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[: _MAX_MESSAGE_CHARS - 3]}...",),
        why=" ".join(entry.section("What it means").partition("\n\n")[0].split()),
        fix=f"{fix_in_rank(entry)}.",
    )


def _find_in_chain(traceback: str) -> tuple[tuple[Entry, ...], str, str]:
    """Return pages, text and traceback of the last exception in the chain, before the raised one, with a page."""
    parts = _NEXT_IN_CHAIN.split(traceback)[:-1]
    for part in reversed(parts):
        message = part.strip().rpartition("\n  ")[2].partition("\n")[2]
        known = tuple(entry for entry in find_known(message) if entry.severity == "error")
        if known:
            return known, message, part
    return (), "", ""


def put_first(known: Finding, findings: list[Finding]) -> str:
    """Insert `known` in `findings`, unless these explain it; it explains that other ranks wait for its rank.

    Returns the fix of a finding if it is more specific than that of the message; empty otherwise.
    """
    if not is_explained(known, findings):
        waits = [replace(each, explained_by=known.code) if each.code in OF_ENDS else each for each in findings]
        findings[:] = [known, *waits]
    better = (each.fix for each in findings if known.code != each.code and {known.code, each.code} <= _OF_CONSTRUCTION)
    return next(better, "")


def find_with_cause(known: Finding | None, find: Callable[[], Findings], is_over: Callable[[], bool]) -> Findings:
    """Return the findings of `find`; if `known` is DDP308, when another rank shows its cause, but within 0.5 s.

    A rank that used fewer parameters than others raises in its next forward pass, maybe before they are in the
    all_reduce. `is_over`: returns True if no rank can come there any more.
    """
    end_s = time.monotonic() + _ARRIVAL_S
    found = find()
    while known is not None and known.code == "DDP308" and not is_explained(known, found):
        if is_over() or time.monotonic() > end_s:
            break
        time.sleep(_PAUSE_S)
        found = find()
    return found


def is_explained(known: Finding, recorded: Sequence[Finding]) -> bool:
    """Return True if `known`, the page of an error message, adds nothing to the findings `recorded`.

    A closed connection is a consequence of a recorded cause; a port in use is a cause itself.
    """
    codes = {finding.code for finding in recorded}
    if known.code == "DDP209" or known.code in codes:
        return True
    if known.code in _OF_CONSTRUCTION:
        return not codes.isdisjoint(_OF_CONSTRUCTION)
    if known.code == "DDP308":
        return not codes.isdisjoint({"DDP212", "DDP310"})
    has_cause = any(code.startswith(("DDP2", "DDP30")) and code != "DDP209" for code in codes)
    return known.code in _CONSEQUENCES_OF_DESYNC and has_cause


def without_waits(findings: Sequence[Finding], known: Finding | None) -> list[Finding]:
    """Drop findings about waiting ranks if `known` says that a rank could not reach them."""
    cannot_connect = known is not None and known.code in _OF_CONNECTING
    return [each for each in findings if not (cannot_connect and each.code in _OF_WAITS)]


def _find_crash_place(lines: Sequence[str]) -> CodeLine | None:
    """Return the innermost user line of the output of Python's fault handler, which lists the innermost call first."""
    called = ""
    for frame in filter(None, map(_FAULT_FRAME.match, lines)):
        file = frame["file"] or frame["cell"]
        if is_users_line(file, frame["function"], called):
            return CodeLine(file=file, line=int(frame["line"]), function=frame["function"])
        called = file
    return None


class CallbackThread:
    """Calls `on_finding` with each finding of a report, one call at a time.

    `stop` is called with a report if the function returned ``"stop"`` for one of its findings; `say` is called with a
    line about any exception that the function raised.
    """

    def __init__(
        self, on_finding: FindingCallback, *, stop: Callable[[Report], None], say: Callable[[str], None]
    ) -> None:
        self._on_finding = on_finding
        self._stop = stop
        self._print = say
        self._todo: deque[Report] = deque()
        self._changed = threading.Condition()
        self._is_running = False

    def call(self, report: Report) -> None:
        """Queue `report`: its findings are passed on after those of earlier reports. Returns at once."""
        with self._changed:
            self._todo.append(report)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="ddpilot-on-finding", daemon=True).start()

    def wait(self, limit_s: float) -> None:
        """Wait until the function has returned from all calls, for at most `limit_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running, limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._todo:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                report = self._todo.popleft()
            if "stop" in [self._ask(finding) for finding in report.findings]:
                self._stop(report)

    def _ask(self, finding: Finding) -> object:
        try:
            return self._on_finding(finding)
        except Exception as error:  # noqa: BLE001 - raised by the user's function: reported, and the job continues
            self._print(f"`on_finding` raised {type(error).__name__}: {error}")
            return None
