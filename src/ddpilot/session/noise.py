# SPDX-License-Identifier: Apache-2.0
"""Filter the log lines that torch's C++ code writes to stderr while ddpilot frees a process group."""

from __future__ import annotations

import re
from typing import Any

from ddpilot.session.protocol.report import FREE, REQUEST

_BEGINNING = re.compile(
    rb"(\[rank\d+\]:)?\[[WE]\d{4} \d\d:\d\d:\d\d\.\d+ "
    rb"(TCPStore\w*|PrefixStore|Store|Utils|socket|ProcessGroup(Gloo|NCCL)?)\.[ch]pp:\d+\] "
)
_REST = re.compile(rb"Exception raised from .*\(most recent call first\):$|frame #\d+: |<omitting python frames>$|$")


class FreeNoise:
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
