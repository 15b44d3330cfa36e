# SPDX-License-Identifier: Apache-2.0
"""Output that bypasses the kernels of ranks (`NativeOutput`), or arrives between cells (`IdleOutput`)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import replace

from ddpilot.launching.rank_server.job import STORE
from ddpilot.launching.spawning import Ended, Wrote
from ddpilot.output.lines import TailBuffer
from ddpilot.output.view import View
from ddpilot.session.kernels.event_router import Event, EventRouter, KernelMessage
from ddpilot.session.kernels.processes import KernelProcesses
from ddpilot.session.kernels.states import START_OVER, RankStates, describe_death

_BEGINNING = re.compile(
    rb"(\[rank\d+\]:)?\[[WE]\d{4} \d\d:\d\d:\d\d\.\d+ "
    rb"(TCPStore\w*|PrefixStore|Store|Utils|socket|ProcessGroup(Gloo|NCCL)?)\.[ch]pp:\d+\] "
)
_REST = re.compile(rb"Exception raised from .*\(most recent call first\):$|frame #\d+: |<omitting python frames>$|$")
"""The first line of a log record of torch's C++ code about a store or process group, and the lines that may follow."""

_SHOWN = frozenset(
    {"stream", "display_data", "update_display_data", "clear_output", "comm_open", "comm_msg", "comm_close"}
)


class NativeOutput:
    """Records the last lines of each rank in `tail`, and removes torch's log lines while a group is freed.

    Hold `EventRouter.lock` to call its methods.
    """

    def __init__(self, router: EventRouter) -> None:
        self.tail = TailBuffer()
        self._router = router
        self._filter = TorchLogFilter()

    def take(self, event: Wrote) -> None:
        """Process output of a rank and pass it on."""
        if event.stream == "stderr":
            event = replace(event, data=self._filter.filter(event.rank, event.data))
        if event.data:
            self.tail.feed(event.rank, event.stream, event.data)
            self._router.put(event)

    def hide_torch_logs(self, ranks: Iterable[int]) -> None:
        """Remove torch's log lines from the output of `ranks`, which are being freed."""
        self._filter.ranks.update(ranks)

    def show_torch_logs(self, ranks: Iterable[int]) -> None:
        """Stop removing them, and show the start of a line that was held back."""
        for rank in ranks:
            self._filter.ranks.discard(rank)
            self.take(Wrote(rank, "stderr", b""))


class TorchLogFilter:
    """Removes the log lines that torch writes to stderr when a group is freed, from the output of `ranks`."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self._held: dict[int, bytes] = {}
        self._is_inside: set[int] = set()
        """Ranks whose last line was such a log line."""

    def filter(self, rank: int, data: bytes) -> bytes:
        """Return the part of `data`, read from the rank's stderr, to show.

        The start of a possible log line is held back.
        """
        data = self._held.pop(rank, b"") + data
        if rank not in self.ranks:
            self._is_inside.discard(rank)
            return data
        *lines, last = data.split(b"\n")
        kept = b"".join(line + b"\n" for line in lines if not self._is_torch_log(rank, line))
        if last and (rank in self._is_inside or last.startswith(b"[")):
            self._held[rank] = last
            return kept
        return kept + last

    def _is_torch_log(self, rank: int, line: bytes) -> bool:
        if _BEGINNING.match(line) is not None:
            self._is_inside.add(rank)
            return True
        is_log = rank in self._is_inside and _REST.match(line) is not None
        if not is_log or not line:
            self._is_inside.discard(rank)
        return is_log


class IdleOutput:
    """Shows in `view` what the ranks print and how they end between cells. `respawns`: the session's option."""

    def __init__(self, view: View, processes: KernelProcesses, states: RankStates, *, respawns: bool) -> None:
        self._view = view
        self._processes = processes
        self._states = states
        self._respawns = respawns
        self.is_ending = False
        """True once the ranks were asked to end: their exits are then not reported."""

    def show(self, event: Event) -> None:
        """Show the event if it has anything to display."""
        now = time.monotonic()
        if isinstance(event, Wrote):
            self._view.raw(event.rank, event.stream, event.data, now)
        elif isinstance(event, Ended) and not self.is_ending:
            self._show_end(event)
        elif isinstance(event, KernelMessage) and event.channel == "iopub" and event.kind in _SHOWN:
            self._view.message(event, now)

    def _show_end(self, ended: Ended) -> None:
        if ended.rank == STORE:
            if self._states.live or self._processes.can_start:  # else the end of all ranks was reported
                self._view.note(f"{self._states.store_end}; {START_OVER}")
        elif ended.rank not in self._states.dead:
            return  # an earlier process of a rank that was restarted since
        elif self._processes.can_start:
            self._view.note(describe_death(ended.rank, self._states.dead[ended.rank], self._respawns))
        elif not self._states.live:  # reported once, for the last rank: the cause is the same
            self._view.note(f"{self._processes.describe_end()}: all ranks and their variables are lost; {START_OVER}")
