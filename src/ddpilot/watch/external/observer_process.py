# SPDX-License-Identifier: Apache-2.0
"""The observer of ranks that ddpilot has not started: a separate process per node that ends with the ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ddpilot.environments.private_files import lock_file, open_own_file, read_own_text
from ddpilot.errors import RecordError
from ddpilot.findings.display import Findings
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.hook import ring_path
from ddpilot.watch.external.rank_process import RankProcess, StoreConnection, error_path, find_rank_processes
from ddpilot.watch.job_folder import OBSERVER, describe_job, locked, remove, remove_old, write_job_info
from ddpilot.watch.nodes.exchange import Exchange
from ddpilot.watch.observer import Observer
from ddpilot.watch.options import WatchOptions
from ddpilot.watch.report import Report, ReportHistory
from ddpilot.watch.snapshot.model import RankException, RankSnapshot
from ddpilot.watch.snapshot.reader import read_process_state

_PAUSE_S = 0.2

_GATHER_S = 10.0
"""Time to wait for the ranks of this node after the first one records; later ones join the observation."""

_TERM_GRACE_S = 3.0
"""Time between SIGTERM and SIGKILL for ranks that are terminated."""


class ObserverProcess:
    """Observes the ranks that record in `folder` until all of them have ended.

    The processes that the ranks have at one time are observed together. A new process of a rank, such as the second
    attempt of a shell, and a rank that joins late restart the observation; what earlier processes did is dropped.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[int, RankProcess] = {}
        self._job: Mapping[str, Any] = {}
        self._options = WatchOptions()
        self._connection: StoreConnection | None = None
        self._history: ReportHistory | None = None
        self._is_stopping = self._has_errors = self._has_ended_ranks = False

    def run(self) -> None:
        """Observe until all ranks have ended; return at once if another process observes them."""
        root = self._folder.parent
        with locked(root):
            fd = open_own_file(self._folder / OBSERVER, os.O_RDWR | os.O_CREAT)
            if not lock_file(fd, wait=False):
                os.close(fd)
                return
        is_over = False
        while not is_over:
            is_clean = self._observe()
            with locked(root):  # a rank that starts after this starts its own observer
                present = find_rank_processes(self._folder).items()
                is_over = not any(self._ranks.get(rank) != each and each.is_running for rank, each in present)
                if is_over:
                    if is_clean:
                        remove(self._folder)
                    os.close(fd)
        remove_old(root)

    def _observe(self) -> bool:
        """Observe the current processes until they end or change; return True if all of them ended cleanly."""
        self._ranks = self._await_ranks()
        if not self._ranks:
            return not self._has_errors
        first = min(self._ranks.values(), key=lambda each: int(each.job["local_rank"]))
        self._job = first.job
        if first.number:
            _write_to_stderr_of(first)
        self._options = WatchOptions(on_finding=self._job["on_finding"], stall_warn_s=self._job["stall_warn_s"])
        self._write_job_info()
        if self._connection is None and self._job["connection"] is not None:
            self._connection = StoreConnection(self._job["connection"])
        self._history = self._history or ReportHistory(self._options.stall_warn_s)
        observer = self._make_observer()
        observer.start()
        while not all(map(_is_over, self._ranks.values())):
            time.sleep(_PAUSE_S)
            if self._is_stopping:
                observer.stop()
                self._end_ranks()
            if self._has_changed():
                observer.stop()
                return False
        observer.stop()
        observer.finish(is_caused=self._has_ended_ranks)
        if self._has_errors and not self._has_ended_ranks:
            _print(f"`ddpilot watch {self._folder.name}` shows this report again")
        if self._connection is not None:
            observer.send_final()
            self._close_connection()
        return not self._has_errors and all(each.returned for each in self._facts().values())

    def _make_observer(self) -> Observer:
        return Observer(
            self._folder,
            self._job["world_size"],
            facts=self._facts,
            notify=self._receive,
            options=self._options,
            name=self._job["name"],
            ranks=tuple(self._ranks),
            exchange=Exchange(self._connection.post) if self._connection is not None else None,
            history=self._history,
        )

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _await_ranks(self) -> dict[int, RankProcess]:
        """Return the ranks of this node that record: all of them, or those that do `_GATHER_S` after the first one."""
        since_s = None
        while True:
            present = find_rank_processes(self._folder)
            found = {rank: each for rank, each in present.items() if self._records(rank, each, present)}
            num_expected = max((each.job["local_world_size"] for each in present.values()), default=1)
            if len(found) >= num_expected or all(map(_is_over, present.values())):
                return found
            since_s = since_s or (time.monotonic() if found else None)
            if since_s is not None and time.monotonic() - since_s > _GATHER_S:
                return found
            time.sleep(_PAUSE_S)

    def _records(self, rank: int, process: RankProcess, present: Mapping[int, RankProcess]) -> bool:
        """True if `process` records, and not in a group that is older than the newest process of any rank."""
        if self._ranks.get(rank) == process:
            return True
        log = self._read(rank) if process.is_running else None
        if log is None or log.pid != process.pid or log.started_ns < process.since_ns:
            return False
        newest_ns = max((each.since_ns for each in present.values() if each.number), default=0)
        return all(entry.start_ns > newest_ns for entry in log.collectives[:1])

    def _read(self, rank: int) -> RankLog | None:
        with suppress(RecordError, OSError):
            return read_ring(ring_path(self._folder, rank))
        return None

    def _has_changed(self) -> bool:
        """True if a rank has a new process, or a rank that is not observed has begun to record."""
        present = find_rank_processes(self._folder)
        if any(present.get(rank, each) != each for rank, each in self._ranks.items()):
            self._forget()
            return True
        return any(self._records(rank, each, present) for rank, each in present.items() if rank not in self._ranks)

    def _forget(self) -> None:
        self._ranks = {}
        self._history = None
        self._has_errors = self._has_ended_ranks = self._is_stopping = False
        self._close_connection()
        for name in ("report.json", "report.txt"):
            (self._folder / name).unlink(missing_ok=True)

    def _write_job_info(self) -> None:
        job, ranks = self._job, sorted(self._ranks)
        about = describe_job(self._folder.name, job["name"], job["command"], job["world_size"], ranks)
        try:
            write_job_info(self._folder, about)
        except OSError as error:
            _print(f"`ddpilot watch` does not list this job: {self._folder} cannot be written to ({error})")

    def _facts(self) -> dict[int, RankSnapshot]:
        found = {}
        for rank, process in self._ranks.items():
            state = read_process_state(process.pid)
            may_return = process.may_return
            if process.is_running:
                # Its shell may try again, as after a failed download: that does not end the rank.
                found[rank] = RankSnapshot(
                    rank=rank, process=state, error=None if may_return else self._read_error(rank)
                )
            elif may_return:
                found[rank] = RankSnapshot(rank=rank, process=replace(state, state="unknown"), is_away=True)
            else:
                log, error = self._read(rank), self._read_error(rank)
                is_closed = log is not None and log.closed_ns is not None
                state = replace(state, state="ended")
                found[rank] = RankSnapshot(rank=rank, process=state, error=error, returned=is_closed and error is None)
        return found

    def _read_error(self, rank: int) -> RankException | None:
        try:
            name, message, text = json.loads(read_own_text(error_path(self._folder, rank)))
        except (OSError, ValueError):
            return None
        return RankException(type_name=name, message=message, traceback=text)

    def _receive(self, report: Report) -> None:
        found = [str(Findings(report.findings, more=report.more))] if report.findings else []
        for text in (*report.notes, *report.status, *found):
            _print(text)
        if any(finding.severity == "error" for finding in report.findings):
            self._has_errors = True
            self._is_stopping = self._options.action() == "stop"

    def _end_ranks(self) -> None:
        live = [each for each in self._ranks.values() if each.is_running]
        if live:
            self._has_ended_ranks = True
            _print(f"terminating the ranks of this node; `ddpilot watch {self._folder.name}` shows this report again")
        _signal(live, signal.SIGTERM)
        deadline_s = time.monotonic() + _TERM_GRACE_S
        while any(each.is_running for each in live) and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)
        _signal(live, signal.SIGKILL)
        self._is_stopping = False


def _is_over(process: RankProcess) -> bool:
    return not (process.is_running or process.may_return)


def _write_to_stderr_of(process: RankProcess) -> None:
    """Write to the stderr of `process`, which may differ from that of the process that started this observer."""
    with suppress(OSError):  # it is a socket, or there is no /proc: stderr stays as it is
        fd = os.open(f"/proc/{process.pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC)
        os.dup2(fd, 2)
        os.close(fd)


def _signal(processes: list[RankProcess], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running:
                psutil.Process(process.pid).send_signal(number)


def _print(text: str) -> None:
    with suppress(OSError):  # the reader of stderr is gone
        sys.stderr.write(f"ddpilot: {text}\n")
        sys.stderr.flush()


def main(folder: Path) -> None:
    """Observe the ranks in `folder`. An error here is reported in one line, and the ranks continue."""
    try:
        ObserverProcess(folder).run()
    except Exception as error:  # noqa: BLE001 - reported; must not stop the training
        _print(f"the observer failed, and the job continues: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
