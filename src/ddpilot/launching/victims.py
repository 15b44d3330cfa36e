# SPDX-License-Identifier: Apache-2.0
"""Distinguish an error that follows from another rank's failure (a victim) from a possible cause.

A victim's error can arrive before the failure that caused it (measured with gloo: up to 0.1 s earlier).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddpilot.launching.exceptions import message_of

_VICTIM_TEXT = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|broken pipe|socket (is )?closed|got 0 bytes"
    r"|gloo.*(pair\.cc|connectFullMesh)|timed out waiting \d+ ?ms for (recv|send) operation"
    r"|application timeout caused pair closure|ncclRemoteError|remote process exited|communicator was aborted"
    r"|(client|server) socket has (failed|timed out)|DistNetworkError|recvValue failed|sendBytes failed"
    r"|process group was freed",
    re.IGNORECASE | re.DOTALL,
)
_VICTIM_TYPES = ("RemoteRankError", "RendezvousError", "DistNetworkError", "DistStoreError")


def is_victim(error: BaseException) -> bool:
    """True if `error`, or an exception it was raised from, looks like a lost connection or a failed peer rank."""
    return any(
        type(link).__name__ in _VICTIM_TYPES
        or (isinstance(link, (RuntimeError, OSError)) and _VICTIM_TEXT.search(message_of(link)))
        for link in _chain(error)
    )


def reads_like_victim(type_name: str, message: str) -> bool:
    """Same as `is_victim`, for an error of which only the type name and the message are known."""
    return type_name in _VICTIM_TYPES or bool(_VICTIM_TEXT.search(message))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
