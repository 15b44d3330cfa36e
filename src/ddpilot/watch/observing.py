# SPDX-License-Identifier: Apache-2.0
"""The observer of ranks that ddpilot has not started: a process of its own on each node, which ends with the ranks."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ddpilot.record.hook import find_rings
from ddpilot.watch.exchange import Exchange
from ddpilot.watch.folders import JobAbout, remove, remove_old, write_about
from ddpilot.watch.gathering import RankFacts
from ddpilot.watch.observer import Observer
from ddpilot.watch.options import WatchOptions
from ddpilot.watch.processes import look_at
from ddpilot.watch.reaching import Way
from ddpilot.watch.report import Report
from ddpilot.watch.view import ErrorView

_PAUSE_S = 0.1

_GATHER_S = 10.0
"""A rank that does not call `enable` so long after the first one did is not waited for."""

_TERM_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL to ranks that are ended."""


class Observing:
    """Observes the ranks that record in `said["folder"]`, by what `enable` says of them."""

    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said
        self._folder = Path(said["folder"])
        self._pids: dict[int, psutil.Process] = {}
        self._first = _find_process(said["rank_pid"])
        self._options = WatchOptions(on_finding=said["on_finding"], stall_warn_s=said["stall_warn_s"])
        self._is_stopping = self._has_errors = self._has_ended_ranks = False

    def run(self) -> None:
        """Observe until no rank is left."""
        self._await_ranks()
        self._write_about()
        way = Way(self._said["way"]) if self._said["way"] is not None else None
        observer = Observer(
            self._folder,
            self._said["world_size"],
            facts=self._facts,
            tell=self._hear,
            options=self._options,
            name=self._said["name"],
            ranks=tuple(self._pids),
            exchange=Exchange(way.post, tuple(self._pids)) if way is not None else None,
        )
        observer.start()
        while any(map(_is_running, self._pids.values())):
            time.sleep(_PAUSE_S)
            if self._is_stopping:
                observer.stop()
                self._end_ranks()
        observer.stop()
        observer.finish(is_caused=self._has_ended_ranks)
        if way is not None:
            observer.say_farewell()
            way.close()
        facts = self._facts().values()
        if not self._has_errors and all(each.returned for each in facts):
            remove(self._folder)
        remove_old(self._folder.parent)

    def _await_ranks(self) -> None:
        """Until all ranks of this node record; or, where some do not, `_GATHER_S` after the first does."""
        since_s = None
        while len(self._pids) < self._said["local_world_size"] and _is_running(self._first):
            for rank in find_rings(self._folder):
                if rank not in self._pids and (process := self._find(rank)) is not None:
                    self._pids[rank] = process
            since_s = since_s or (time.monotonic() if self._pids else None)
            if since_s is not None and time.monotonic() - since_s > _GATHER_S:
                return
            time.sleep(_PAUSE_S)

    def _find(self, rank: int) -> psutil.Process | None:
        from ddpilot.errors import RecordError
        from ddpilot.record.hook import ring_path
        from ddpilot.record.reading import read_ring

        with suppress(RecordError, OSError, psutil.Error):
            log = read_ring(ring_path(self._folder, rank), newest=1)
            if log.closed_ns is None:  # else of a job that had this folder before
                return psutil.Process(log.pid)
        return None

    def _write_about(self) -> None:
        about = JobAbout(
            id=self._folder.name,
            name=self._said["name"],
            command=tuple(self._said["command"]),
            world_size=self._said["world_size"],
            host=platform.node(),
            pid=os.getpid(),
            pid_started_s=psutil.Process().create_time(),
            started_s=time.time(),
            ranks=tuple(sorted(self._pids)),
        )
        for name in ("report.json", "report.txt"):
            (self._folder / name).unlink(missing_ok=True)
        write_about(self._folder, about)

    def _facts(self) -> dict[int, RankFacts]:
        found = {}
        for rank, process in self._pids.items():
            view = look_at(process.pid)
            error = self._read_error(rank)
            found[rank] = RankFacts(
                process=view, error=error, returned=view.state == "ended" and error is None and self._is_closed(rank)
            )
        return found

    def _is_closed(self, rank: int) -> bool:
        from ddpilot.errors import RecordError
        from ddpilot.record.hook import ring_path
        from ddpilot.record.reading import read_ring

        try:
            return read_ring(ring_path(self._folder, rank), newest=1).closed_ns is not None
        except (OSError, RecordError):  # of a ring that is damaged, `Observer` says so
            return False

    def _read_error(self, rank: int) -> ErrorView | None:
        try:
            name, message, text = json.loads((self._folder / f"rank{rank}.error").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return ErrorView(type_name=name, message=message, traceback=text)

    def _hear(self, report: Report) -> None:
        for line in (*report.notes, *report.status):
            _say(line)
        if not report.findings:
            return
        _say(str(report.findings))
        if any(finding.severity == "error" for finding in report.findings):
            self._has_errors = True
            self._is_stopping = self._options.action() == "stop"

    def _end_ranks(self) -> None:
        live = [process for process in self._pids.values() if _is_running(process)]
        if live:
            self._has_ended_ranks = True
            _say(f"the ranks of this node are ended because of it; `ddpilot watch {self._folder.name}` shows it again")
        _signal(live, signal.SIGTERM)
        deadline_s = time.monotonic() + _TERM_GRACE_S
        while any(map(_is_running, live)) and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)
        _signal(live, signal.SIGKILL)
        self._is_stopping = False


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):  # psutil looks whether it still is that process
            process.send_signal(number)


def _find_process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:  # it has ended meanwhile
        return None


def _is_running(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _say(text: str) -> None:
    with suppress(OSError):  # whoever read that is gone
        sys.stderr.write(f"ddpilot: {text}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    Observing(json.loads(sys.argv[-1])).run()
