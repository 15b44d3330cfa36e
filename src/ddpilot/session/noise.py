# SPDX-License-Identifier: Apache-2.0
"""What torch's C++ writes to stderr when ddpilot takes a group away under it: it says nothing that a person can use."""

from __future__ import annotations

import re
from typing import Any

from ddpilot.session.report import FREE, REQUEST

_BEGINNING = re.compile(
    rb"(\[rank\d+\]:)?\[[WE]\d{4} \d\d:\d\d:\d\d\.\d+ "
    rb"(TCPStore\w*|PrefixStore|Store|Utils|socket|ProcessGroup(Gloo|NCCL)?)\.[ch]pp:\d+\] "
)
_REST = re.compile(rb"Exception raised from .*\(most recent call first\):$|frame #\d+: |<omitting python frames>$|$")


class FreeNoise:
    """Leaves such lines out of what a rank writes, from the moment at which it is freed until its group is rebuilt."""

    def __init__(self) -> None:
        self._rebuilds: dict[int, str] = {}
        """By rank that is being freed: the id of the message that asks for the rebuild, "" before that."""

        self._held: dict[int, bytes] = {}
        self._is_inside: set[int] = set()
        """The ranks of which the last line was of that kind."""

    def sending(self, rank: int, kind: str, content: dict[str, Any], message_id: str) -> None:
        """A message goes to a rank: is it freed, its group rebuilt, or something of the person's begun?"""
        if kind == FREE:
            self._rebuilds.setdefault(rank, "")
        elif kind == REQUEST and content["verb"] == "rebuild":
            self._rebuilds[rank] = message_id
        elif kind in (REQUEST, "execute_request"):
            self._rebuilds.pop(rank, None)

    def ends_with(self, rank: int, message_id: str) -> bool:
        """Whether the end of what that message asked for is the end of freeing the rank; then it is over."""
        is_over = bool(message_id) and self._rebuilds.get(rank) == message_id
        if is_over:
            del self._rebuilds[rank]
        return is_over

    def forget(self, rank: int) -> None:
        """The rank has died: what it wrote last is to be read."""
        self._rebuilds.pop(rank, None)

    def filter(self, rank: int, data: bytes) -> bytes:
        """What of `data`, read from the rank's stderr, is to be shown. The start of such a line waits for its end."""
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
