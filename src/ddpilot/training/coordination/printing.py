# SPDX-License-Identifier: Apache-2.0
"""Output and work on rank 0 first: messages that are printed once, and `rank_zero_first`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ddpilot.errors import RemoteRankError
from ddpilot.group.protocol import GroupLike


class SayOnce:
    """Calls `say` with a sentence, unless it has already been called with it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    def __call__(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)


@contextmanager
def rank_zero_first(group: GroupLike) -> Iterator[None]:
    """Run the block on rank 0, then on the other ranks in parallel; see `Loop.rank_zero_first`. Collective."""
    if group.world_size == 1:
        yield
        return
    if not group.is_rank_zero:
        failure = group.broadcast_object(None)
        if failure:
            raise RemoteRankError(
                "waiting for rank 0 to go first",
                found=f"rank 0 raised {failure}",
                fix="Look at rank 0's traceback; this rank stops with it.",
                rank=group.rank,
            )
        yield
        return
    failure = "an exit"
    try:
        yield
        failure = ""
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        group.broadcast_object(failure)
