# SPDX-License-Identifier: Apache-2.0
"""Filter the bytes that rank processes write directly to file descriptors 1 and 2, bypassing their kernel."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

from ddpilot.launching.rank_server.job import STORE
from ddpilot.launching.spawning import Ended, Wrote
from ddpilot.output.lines import TailBuffer
from ddpilot.output.view import RankMessage, View
from ddpilot.session.kernels.event_router import EventRouter
from ddpilot.session.kernels.events import Event, KernelMessage
from ddpilot.session.kernels.processes import KernelProcesses
from ddpilot.session.kernels.states import START_OVER, RankStates, describe_death
from ddpilot.session.protocol.report import FREE, REQUEST


class NativeOutput:
    """Records the last lines of each rank in `tails`, and removes torch's log lines while a group is freed."""

    def __init__(self, attention: EventRouter) -> None:
        self.tails = TailBuffer()
        self._attention = attention
        self._noise = TorchLogFilter()

    def take(self, event: Wrote) -> None:
        """Process output of a rank and pass it on. The caller holds `EventRouter.switch`."""
        if event.stream == "stderr":
            event = replace(event, data=self._noise.filter(event.rank, event.data))
        if event.data:
            self.tails.feed(event.rank, event.stream, event.data)
            self._attention.put(event)

    def sending(self, rank: int, kind: str, content: dict[str, Any], message_id: str) -> None:
        """Called for each message to a rank, which may start or end the removal of log lines."""
        self._noise.sending(rank, kind, content, message_id)

    def request_ended(self, rank: int, message_id: str) -> None:
        """Called when the rank has finished the request `message_id`."""
        if self._noise.ends_with(rank, message_id):
            self._release(rank)

    def process_ended(self, rank: int) -> None:
        """Called when the rank's process has ended."""
        self._noise.forget(rank)
        self._release(rank)

    def _release(self, rank: int) -> None:
        self.take(Wrote(rank, "stderr", b""))


_BEGINNING = re.compile(
    rb"(\[rank\d+\]:)?\[[WE]\d{4} \d\d:\d\d:\d\d\.\d+ "
    rb"(TCPStore\w*|PrefixStore|Store|Utils|socket|ProcessGroup(Gloo|NCCL)?)\.[ch]pp:\d+\] "
)
_REST = re.compile(rb"Exception raised from .*\(most recent call first\):$|frame #\d+: |<omitting python frames>$|$")


class TorchLogFilter:
    """Removes these lines from a rank's stderr, from the request to free the rank until its group is rebuilt."""

    def __init__(self) -> None:
        self._rebuilds: dict[int, str] = {}
        """By rank that is being freed: the id of the rebuild request, or "" before it is sent."""

        self._held: dict[int, bytes] = {}
        self._is_inside: set[int] = set()
        """Ranks whose last line was such a log line."""

    def sending(self, rank: int, kind: str, content: dict[str, Any], message_id: str) -> None:
        """Update the state for a message to a rank: a request to free it, to rebuild its group, or other work."""
        if kind == FREE:
            self._rebuilds.setdefault(rank, "")
        elif kind == REQUEST and content["verb"] == "rebuild":
            self._rebuilds[rank] = message_id
        elif kind in (REQUEST, "execute_request"):
            self._rebuilds.pop(rank, None)

    def ends_with(self, rank: int, message_id: str) -> bool:
        """True if `message_id` is the rank's rebuild request, which ends the filtering for this rank."""
        is_over = bool(message_id) and self._rebuilds.get(rank) == message_id
        if is_over:
            del self._rebuilds[rank]
        return is_over

    def forget(self, rank: int) -> None:
        """Stop filtering a rank that has died, so that its last output is shown."""
        self._rebuilds.pop(rank, None)

    def filter(self, rank: int, data: bytes) -> bytes:
        """Return the part of `data`, read from the rank's stderr, to show.

        The start of a possible log line is held back.
        """
        data = self._held.pop(rank, b"") + data
        if rank not in self._rebuilds:
            self._is_inside.discard(rank)
            return data
        *lines, last = data.split(b"\n")
        kept = b"".join(line + b"\n" for line in lines if not self._is_noise(rank, line))
        if last and (rank in self._is_inside or last.startswith(b"[")):
            self._held[rank] = last
            return kept
        return kept + last

    def _is_noise(self, rank: int, line: bytes) -> bool:
        if _BEGINNING.match(line) is not None:
            self._is_inside.add(rank)
            return True
        is_noise = rank in self._is_inside and _REST.match(line) is not None
        if not is_noise or not line:
            self._is_inside.discard(rank)
        return is_noise


_SHOWN = frozenset(
    {"stream", "display_data", "update_display_data", "clear_output", "comm_open", "comm_msg", "comm_close"}
)


class IdleOutput:
    """Shows in `view` what the ranks of `host` print and how they end between cells.

    `respawns`: the session's option.
    """

    def __init__(self, view: View, host: KernelProcesses, standing: RankStates, *, respawns: bool) -> None:
        self._view = view
        self._host = host
        self._standing = standing
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
            message = RankMessage(event.rank, event.kind, event.content, event.metadata, event.buffers)
            self._view.message(message, now)

    def _show_end(self, ended: Ended) -> None:
        if ended.rank == STORE:
            self._view.note(f"{self._standing.store_end}; {START_OVER}")
        elif ended.rank not in self._standing.dead:
            return  # an earlier process of a rank that was restarted since
        elif self._host.can_start:
            self._view.note(describe_death(ended.rank, self._standing.dead[ended.rank], self._respawns))
        elif not self._standing.live:  # reported once, for the last of them: the cause is the same
            self._view.note(f"the rank server has died, and all ranks and their variables with it; {START_OVER}")
