# SPDX-License-Identifier: Apache-2.0
"""Filter the bytes that rank processes write directly to file descriptors 1 and 2, bypassing their kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpilot.output.tails import Tails
from ddpilot.session.kernels.event_router import Attention
from ddpilot.session.kernels.events import Wrote
from ddpilot.session.noise import FreeNoise


class Written:
    """Records the last lines of each rank in `tails`, and removes torch's log lines while a group is freed."""

    def __init__(self, attention: Attention) -> None:
        self.tails = Tails()
        self._attention = attention
        self._noise = FreeNoise()

    def take(self, event: Wrote) -> None:
        """Process output of a rank and pass it on. The caller holds `Attention.switch`."""
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
