# SPDX-License-Identifier: Apache-2.0
"""`Node`: the parent's connection to the host process of one node, and the processes that started it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections import deque
from typing import Any

from ddpilot.errors import LaunchError
from ddpilot.launching.rank_environment import NodePlacement
from ddpilot.session.nodes import messages
from ddpilot.session.nodes.link import Link, PipeStream, Stream

SILENCE_S = 4.0
"""Seconds without a sign of life after which a node counts as lost; a host sends one every second."""

_NUM_LINES = 40
_MAX_BANNER_BYTES = 1 << 18
_CLOCK_DRIFT = 1e-4
"""Seconds per second by which two unsynchronized clocks may drift apart; crystals are specified to 1e-5 to 5e-5."""

_NUM_CLOCKS = 5
_END_LIMIT_S = 12.0


class StartProcess:
    """A process that starts hosts (ssh or srun). Its last lines on stderr are kept for errors."""

    def __init__(self, command: list[str], line: bytes, *, keeps_pipes: bool) -> None:
        self.name = command[0]
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if keeps_pipes else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for the notebook, which interrupts the ranks
        )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has exited, which its stderr explains
            os.write(self._process.stdin.fileno(), line)
        self._reader = threading.Thread(target=self._read, name="ddpilot-stderr", daemon=True)
        self._reader.start()

    def pipes(self) -> tuple[int, int]:
        """Return descriptors, which the caller owns, of its standard output and input."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        found = os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno())
        self._process.stdin.close()
        self._process.stdout.close()
        return found

    @property
    def exitcode(self) -> int | None:
        """Its exit code; None while it is running."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def text(self) -> str:
        """Return what it has written to stderr, as far as that is kept."""
        return "\n".join([*self._lines])

    def last_lines(self) -> str:
        """Return the last lines of its stderr, each indented."""
        if self.exitcode is not None:
            self._reader.join(0.5)
        return "".join(f"\n  {line}" for line in [*self._lines][-15:])

    def close(self, limit_s: float) -> None:
        """Wait up to `limit_s` seconds for its end, then kill it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1.0)

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            for line in stderr:
                self._lines.append(line.decode(errors="replace").rstrip())


class Node:
    """One node of a session. `name`: as the user has given it, or as Slurm has."""

    def __init__(self, name: str, node_rank: int, starter: StartProcess) -> None:
        self.name = name
        self.node_rank = node_rank
        self.starter = starter
        self.link: Link | None = None
        self.hello: messages.HostHello
        self.placement: NodePlacement
        self.folder = ""
        """The session's private folder on the node."""
        self.offset_s = 0.0
        """What the node's monotonic clock is ahead of this machine's, when both were compared."""
        self._compared_s = time.monotonic()
        self.step = ""
        """Slurm's id of the step that runs the host; "" if there is none."""
        self.is_lost = False
        """True once its loss was reported, or the session has ended."""
        self.was_lost = False
        """True if it was lost before the session ended."""
        self.why_lost = ""
        """The reason, as in `Link.lost`; empty if it was not lost."""

    def use(self, stream: Stream, received: bytes = b"") -> None:
        """Use `stream` from now on."""
        self.link = Link(stream, silence_s=SILENCE_S, received=received)

    def open_pipes(self, deadline_s: float) -> None:
        """Use the pipes of the starter, after anything that a login shell prints. Raises LaunchError."""
        reader, writer = self.starter.pipes()
        stream, data = PipeStream(reader, writer), b""
        while messages.MAGIC not in data:
            part = stream.read(0.2)
            if part == b"" or len(data) > _MAX_BANNER_BYTES or time.monotonic() > deadline_s:
                stream.close()
                self.starter.close(1.0)
                raise self.error(f"its host process did not start{self.describe_starter()}{_quote(data)}")
            data += part or b""
        self.use(stream, data.partition(messages.MAGIC)[2])

    def describe_starter(self) -> str:
        """Describe how the starter has ended, with its last lines."""
        code = self.starter.exitcode
        how = "" if code is None else f": {self.starter.name} exited with code {code}"
        return f"{how}{self.starter.last_lines()}"

    def error(self, found: str, fix: str = "") -> LaunchError:
        """Return an error about the start of this node."""
        advice = f"Check that `{self.starter.name} {self.name} true` works without a password"
        return LaunchError(f"starting node {self.name}", found=found, fix=fix or advice)

    def receive(self, kinds: tuple[type, ...], limit_s: float) -> Any:
        """Return the next message of one of `kinds`; others are dropped. Raises LaunchError."""
        assert self.link is not None
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                message = self.link.wait(max(0.0, deadline_s - time.monotonic()))
            except TimeoutError:
                raise self.error(f"it did not answer in {limit_s:g} s{self.describe_starter()}") from None
            if message is None:
                raise self.error(f"it {self.link.lost}{self.describe_starter()}")
            if isinstance(message, kinds):
                return message

    def compare_clocks(self, limit_s: float) -> None:
        """Measure `offset_s`, in the fastest of a few round trips."""
        best_s = float("inf")
        for _ in range(_NUM_CLOCKS):
            sent_s = time.monotonic()
            self.send(messages.Clock(sent_s))
            answer = self.receive((messages.Clock,), limit_s)
            took_s = time.monotonic() - sent_s
            if took_s < best_s:
                best_s, self.offset_s = took_s, answer.answered_s - (sent_s + took_s / 2)
        self._compared_s = time.monotonic()

    def clock_error_s(self) -> float:
        """Return how far the two clocks may have moved apart since they were compared."""
        return _CLOCK_DRIFT * (time.monotonic() - self._compared_s)

    def send(self, message: Any) -> None:
        """Send a message. Does nothing if the node is lost."""
        if self.link is not None:
            self.link.send(message)

    def close_link(self) -> None:
        """Close the connection to a host that is lost, and what started that host if it started nothing else."""
        if self.link is not None:
            self.link.close()
        self.link = None

    def close(self, *, is_killed: bool = False) -> None:
        """Ask the host to end its ranks and itself, and wait for it."""
        self.is_lost = True
        if self.link is not None:
            self.link.send(messages.EndHost())
            deadline_s = time.monotonic() + (0.0 if is_killed else _END_LIMIT_S)
            while not self.link.lost and time.monotonic() < deadline_s:
                time.sleep(0.005)
            self.link.close()


def _quote(data: bytes) -> str:
    text = data.decode(errors="replace").strip()[-500:]
    return f"; it wrote: {text}" if text else ""
