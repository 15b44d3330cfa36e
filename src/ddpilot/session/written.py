# SPDX-License-Identifier: Apache-2.0
"""What the processes of the ranks write past their kernels, on the way to whoever is told of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpilot.session.attention import Attention
from ddpilot.session.events import Wrote
from ddpilot.session.noise import FreeNoise
from ddpilot.session.tails import Tails


class Written:
    """Keeps the last lines of each rank (`tails`) and leaves out noise."""

    def __init__(self, attention: Attention) -> None:
        self.tails = Tails()
        self._attention = attention
        self._noise = FreeNoise()

    def take(self, event: Wrote) -> None:
        """Hand on what a rank wrote; to be called under the attention's switch."""
        if event.stream == "stderr":
            event = replace(event, data=self._noise.filter(event.rank, event.data))
        if event.data:
            self.tails.feed(event.rank, event.stream, event.data)
            self._attention.put(event)

    def sending(self, rank: int, kind: str, content: dict[str, Any], message_id: str) -> None:
        """A message goes to a rank: what it writes meanwhile may be noise."""
        self._noise.sending(rank, kind, content, message_id)

    def request_ended(self, rank: int, message_id: str) -> None:
        """What that message asked for is over."""
        if self._noise.ends_with(rank, message_id):
            self._release(rank)

    def process_ended(self, rank: int) -> None:
        """Nothing more will come of the rank."""
        self._noise.forget(rank)
        self._release(rank)

    def _release(self, rank: int) -> None:
        self.take(Wrote(rank, "stderr", b""))
