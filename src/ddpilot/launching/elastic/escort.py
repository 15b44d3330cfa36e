# SPDX-License-Identifier: Apache-2.0
"""The companion of one attempt of a run after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ddpilot.errors import RankError, WatchError
from ddpilot.launching.companion import Carrier, Companion, RankState
from ddpilot.launching.elastic.worker_main import HOOKS_VARIABLE

Accompany = Callable[[str, int, tuple[int, ...], Carrier | None], Companion | None]
"""Makes who goes along, of the name, the world size, the ranks of this node and what leads to the other nodes, None
where there are none; None for nobody."""


class Escort:
    """Asks `accompany`, where there is one, for a companion for each attempt; `say` shows a line.

    `open_post`: gives what leads to the other nodes in an attempt.
    """

    def __init__(
        self,
        accompany: Accompany | None,
        name: str,
        say: Callable[[str], None],
        open_post: Callable[[], Carrier | None] = lambda: None,
    ) -> None:
        self._accompany = accompany
        self._open_post = open_post
        self._name = name
        self._say = say
        self._companion: Companion | None = None

    def begin_attempt(self, world_size: int, ranks: tuple[int, ...]) -> Mapping[str, str]:
        """The variables for the environment of `ranks`, which are about to be started."""
        self.end(is_clean=False)
        if self._accompany is None:
            return {}
        self._companion = companion = self._accompany(self._name, world_size, ranks, self._open_post())
        if companion is None:
            return {}
        return {**companion.variables, HOOKS_VARIABLE: ",".join(companion.hooks)}

    def watch(self, ranks: Sequence[RankState]) -> None:
        """The ranks have been started."""
        if self._companion is not None:
            self._companion.begin(ranks, {})

    def take(self) -> WatchError | None:
        """Show what there is to say; the error that the attempt is to end with, else None."""
        return None if self._companion is None else self._companion.take(self._say)

    def explain(self, error: RankError) -> None:
        """Add to `error`, by which the attempt ends, what was seen from outside."""
        if self._companion is not None:
            self._companion.explain(error)

    def finish(self) -> WatchError | None:
        """The ranks have ended well: show what there is to say; the error that the run ends with if any."""
        return None if self._companion is None else self._companion.finish(self._say)

    def end(self, *, is_clean: bool) -> None:
        """The attempt is over."""
        companion, self._companion = self._companion, None
        if companion is not None:
            companion.take(self._say)
            companion.end(is_clean)
