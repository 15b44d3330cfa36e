# SPDX-License-Identifier: Apache-2.0
"""Thread that shows the output of this node's ranks, while the agent's main thread waits for other events."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import selectors
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from ddpilot.output.pipe_reader import PipeReader
from ddpilot.output.writer import LabelledWriter

_IDLE_S = 0.2
_SMALL_BYTES = 16 << 10
_GATHER_S = 0.01
"""Pause in seconds after a small read. Each wake-up costs more than a line, so several lines are collected first."""

_PIPE_BYTES = 256 << 10
"""Pipe capacity: how much a rank can print before it blocks on this process. The kernel's default is 64 KiB."""
_INVISIBLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x20\x7f]")
Pipe = tuple[int, str]
"""A rank and the name of its stream: (3, "stderr")."""


class OutputThread:
    """Shows the ranks' pipes, attempt after attempt, and ddpilot's notices between their lines."""

    def __init__(self, display: LabelledWriter) -> None:
        self._display = display
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._pipes = PipeReader(1, display)  # replaced for each attempt
        self._readers: dict[Pipe, int] = {}
        self._writers: dict[Pipe, int] = {}
        self._copies: dict[Pipe, BinaryIO] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ddpilot-output", daemon=True)
        self.broken: OSError | None = None
        """Why output cannot be shown any more: its reader has exited (`ddpilot run ... | head`) or the disk is full."""

    def __enter__(self) -> OutputThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_attempt()
        self._stopping = True
        self._thread.join()
        self._selector.close()

    def begin_attempt(
        self,
        ranks: Sequence[int],
        copies: Mapping[Pipe, Path | None],
        shown_ranks: Container[int] | None,
    ) -> dict[Pipe, str]:
        """Create a pipe for each key of `copies`; return the paths that the ranks open as their streams.

        `copies`: the file that also gets all bytes of the pipe, or None; `shown_ranks`: ranks whose output is shown,
        None for all.
        """
        with self._lock:
            self.end_attempt()
            self._display.shown_ranks = shown_ranks
            self._copies = {pipe: path.open("wb", buffering=0) for pipe, path in copies.items() if path}
            self._pipes = PipeReader(ranks, self._display, self._copies)
            for pipe in copies:
                reader, writer = os.pipe()
                os.set_blocking(reader, False)
                _enlarge(writer)
                self._readers[pipe], self._writers[pipe] = reader, writer
                self._selector.register(reader, selectors.EVENT_READ, pipe)
            return {pipe: f"/dev/fd/{writer}" for pipe, writer in self._writers.items()}

    def end_attempt(self) -> None:
        """Show what is left in the pipes, and close them. Call this after the ranks have exited."""
        with self._lock:
            for pipe, reader in self._readers.items():
                self._drain(pipe)
                self._selector.unregister(reader)
                os.close(reader)
                os.close(self._writers[pipe])
            self._show(self._pipes.close)
            for file in self._copies.values():
                file.close()
            self._readers, self._writers, self._copies = {}, {}, {}

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """The last lines that `rank` wrote to its pipes, without trailing lines that show nothing."""
        with self._lock:
            for pipe in self._readers:
                if pipe[0] == rank:
                    self._drain(pipe)
            lines = self._pipes.last_lines(rank)
        shown = [at for at, line in enumerate(lines) if _INVISIBLE.sub("", line)]
        return lines[: shown[-1] + 1] if shown else ()

    def note(self, text: str) -> None:
        """Show one notice of ddpilot, after what the ranks wrote before."""
        with self._lock:
            self._show(lambda: self._pipes.show(time.monotonic()))
            self._show(lambda: self._display.note(text))
            self._show(self._display.flush)

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                due_s = self._pipes.next_due_s()
            wait_s = _IDLE_S if due_s is None else min(_IDLE_S, max(0.0, due_s - time.monotonic()))
            num_bytes = 0
            for key, _ in self._selector.select(wait_s):
                with self._lock:
                    num_bytes += self._read(key.data)
            with self._lock:
                self._show(lambda: self._pipes.show(time.monotonic()))
                self._show(self._display.flush)
            if 0 < num_bytes < _SMALL_BYTES:
                time.sleep(_GATHER_S)

    def _read(self, pipe: Pipe) -> int:
        """Read at most 64 KiB from `pipe`; returns the number of bytes."""
        if pipe not in self._readers:  # the attempt has ended in the meantime
            return 0
        before = self._pipes.num_bytes
        self._show(lambda: self._pipes.read(self._readers[pipe], *pipe, time.monotonic()))
        return self._pipes.num_bytes - before

    def _drain(self, pipe: Pipe) -> None:
        self._show(lambda: self._pipes.drain(self._readers[pipe], *pipe, time.monotonic()))

    def _show(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BlockingIOError:  # a different call has read the data
            return
        except OSError as error:
            self.broken = error


def _enlarge(pipe: int) -> None:
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # the user's limit of memory for pipes is reached
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
