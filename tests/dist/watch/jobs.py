# SPDX-License-Identifier: Apache-2.0
"""Run scripts on real ranks that record, look at them from outside while they hang, and end them."""

from __future__ import annotations

import json
import linecache
import os
import runpy
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ddpilot
from ddpilot.errors import DdpilotError, RecordError
from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.hook import ring_path
from ddpilot.record.main_thread import answer_with_stacks, stacks_path
from ddpilot.user_files import CodeLine
from ddpilot.watch.snapshot.files import take_stacks
from ddpilot.watch.snapshot.model import JobSnapshot, ProcessState, PythonStack, RankException, RankSnapshot
from tests.preload import PRELOAD

LIMIT_S = 90.0


def run_script(script: Path, folder: Path) -> None:
    """In a rank: run the file as a program, recorded; what became of it is written beside the ring."""
    rank = int(os.environ["RANK"])
    answer_with_stacks(stacks_path(folder, rank))
    said: dict[str, Any] = {"pid": os.getpid(), "error": None}
    with start_recording(ring_path(folder, rank), rank=rank):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except BaseException as error:
            said["error"] = [type(error).__name__, str(error), traceback.format_exc()]
            raise
        finally:
            (folder / f"rank{rank}.new").write_text(json.dumps(said), encoding="utf-8")
            os.replace(folder / f"rank{rank}.new", folder / f"rank{rank}.end")


def _frame(file: str, line: int, function: str) -> CodeLine:
    return CodeLine(file, line, function, linecache.getline(file, line).strip())


class Job:
    """A script on so many ranks, each with its ring in `folder`; a context manager that ends what is left of them."""

    def __init__(self, script: Path, num_ranks: int) -> None:
        self.folder = script.parent / f"{script.stem}-rings"
        self.folder.mkdir()
        self._num_ranks = num_ranks
        self._launcher = ddpilot.Launcher(
            nproc_per_node=num_ranks, timeout_s=LIMIT_S, output="silent", watch=False, preload=PRELOAD
        )
        self._thread = threading.Thread(target=self._run, args=(script,))

    def __enter__(self) -> Job:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for log in self._logs().values():
            with suppress(ProcessLookupError):
                os.kill(log.pid, signal.SIGKILL)
        self._thread.join(LIMIT_S)

    def look(self, stacks_of: Sequence[int] = ()) -> JobSnapshot:
        """All ranks as they are now, with the stacks of some."""
        alive = {rank: self._is_alive(log.pid) for rank, log in self._logs().items()}
        logs = self._logs()
        stacks = {rank: self._stack(rank, logs[rank].pid) for rank in stacks_of if alive.get(rank)}
        ranks = {rank: self._view(rank, log, alive.get(rank, True), stacks.get(rank)) for rank, log in logs.items()}
        return JobSnapshot(world_size=self._num_ranks, ranks=ranks, now_ns=time.monotonic_ns(), name="job")

    def look_until(self, holds: Callable[[JobSnapshot], bool]) -> JobSnapshot:
        """The first look of which `holds` is true; an error when that never comes."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            view = self.look()
            if holds(view):
                return view
            time.sleep(0.05)
        raise AssertionError(f"not within {LIMIT_S} s: {view}")

    def _run(self, script: Path) -> None:
        with suppress(DdpilotError):  # ranks that are killed fail
            self._launcher.run(run_script, script, self.folder)

    def _logs(self) -> dict[int, RankLog]:
        logs = {}
        for rank in range(self._num_ranks):
            with suppress(OSError, RecordError):
                logs[rank] = read_ring(ring_path(self.folder, rank), newest=512)
        return logs

    def _view(self, rank: int, log: RankLog, is_alive: bool, stack: PythonStack | None) -> RankSnapshot:
        error = None
        end = self.folder / f"rank{rank}.end"
        has_ended = end.exists()
        if has_ended and (said := json.loads(end.read_text(encoding="utf-8"))["error"]) is not None:
            error = RankException(type_name=said[0], message=said[1], traceback=said[2])
        process = ProcessState(pid=log.pid, host=log.host, state="running" if is_alive else "ended")
        returned = has_ended and error is None
        return RankSnapshot(rank=rank, log=log, process=process, stack=stack, error=error, returned=returned)

    def _stack(self, rank: int, pid: int) -> PythonStack | None:
        return take_stacks(self.folder, {rank: pid}).get(rank)

    @staticmethod
    def _is_alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False
