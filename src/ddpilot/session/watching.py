# SPDX-License-Identifier: Apache-2.0
"""A session's ranks as who watches them sees them, and what is seen of one cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import dropwhile

from ddpilot.errors import RankError, WatchError
from ddpilot.launching.local.report import Exited, Raised
from ddpilot.session.standing import Standing
from ddpilot.watch.watcher import Watcher


class SeenRank:
    """One rank of a session: its program is the cell. `pid`: of the rank's process, also where it has ended."""

    def __init__(self, rank: int, standing: Standing, pid: Callable[[int], int | None]) -> None:
        self.rank = rank
        self._standing = standing
        self._pid = pid

    @property
    def pid(self) -> int | None:
        """Of its process."""
        return self._pid(self.rank)

    @property
    def exited(self) -> Exited | None:
        """How its process ended."""
        return self._standing.exited.get(self.rank)

    @property
    def raised(self) -> Raised | None:
        """What the cell raised there."""
        return self._standing.raised.get(self.rank)

    @property
    def has_returned(self) -> bool:
        """Whether the cell is over there, and went well."""
        return self.exited is None and self.raised is None and self.rank not in self._standing.busy


class CellLookout:
    """What `watcher` sees while the cell `name` runs on all ranks; `note` shows it.

    `since_s`: when it began; `sources`: its text, by the name that lines have.
    """

    def __init__(
        self, watcher: Watcher, name: str, since_s: float, sources: Mapping[str, str], note: Callable[[str], None]
    ) -> None:
        self._watcher = watcher
        self._note = note
        watcher.resume(name, int(since_s * 1e9), {file: as_counted(text) for file, text in sources.items()})

    def look(self, busy: Sequence[int], now_s: float) -> WatchError | None:  # noqa: ARG002 - for other lookouts
        """Show what is new; what the cell is to end with, where it is to end."""
        return self._watcher.take(self._note)

    def explain(self, error: RankError) -> None:
        """Add what was seen to the error by which the cell ends."""
        self._watcher.explain(error)

    def close(self, *, is_ok: bool) -> WatchError | None:
        """The cell is over: if it ended well, show what is new; an error if the cell is to end with one."""
        return self._watcher.pause(self._note, is_ok=is_ok)


def as_counted(code: str) -> str:
    """A cell from the first line on that is not empty, from which IPython counts."""
    return "".join(dropwhile(lambda line: not line.strip(), code.splitlines(keepends=True)))
