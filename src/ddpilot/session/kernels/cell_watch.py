# SPDX-License-Identifier: Apache-2.0
"""Adapters between a session and `Watcher`: its ranks as seen by the watcher, and the findings of one cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import dropwhile

from ddpilot.errors import RankError, WatchError
from ddpilot.launching.rank_reports import Exited, Raised
from ddpilot.session.kernels.states import Standing
from ddpilot.watch.companion import Watcher


class SeenRank:
    """One rank of a session, whose program is the current cell. `pid` returns the process id, also after its end."""

    def __init__(self, rank: int, standing: Standing, pid: Callable[[int], int | None]) -> None:
        self.rank = rank
        self._standing = standing
        self._pid = pid

    @property
    def pid(self) -> int | None:
        """Process id, also after the process has ended."""
        return self._pid(self.rank)

    @property
    def exited(self) -> Exited | None:
        """Exit status of its process; None while it is running."""
        return self._standing.exited.get(self.rank)

    @property
    def raised(self) -> Raised | None:
        """The exception that the cell raised on this rank; None if it raised none."""
        return self._standing.raised.get(self.rank)

    @property
    def has_returned(self) -> bool:
        """True if the cell has ended on this rank without an error."""
        return self.exited is None and self.raised is None and self.rank not in self._standing.busy


class CellLookout:
    """Reports the findings of `watcher` through `note` while the cell `name` runs on all ranks.

    `since_s`: the start of the cell (monotonic clock); `sources`: its text, by the file name in its code objects.
    """

    def __init__(
        self, watcher: Watcher, name: str, since_s: float, sources: Mapping[str, str], note: Callable[[str], None]
    ) -> None:
        self._watcher = watcher
        self._note = note
        watcher.resume(name, int(since_s * 1e9), {file: as_counted(text) for file, text in sources.items()})

    def look(self, busy: Sequence[int], now_s: float) -> WatchError | None:  # noqa: ARG002 - for other lookouts
        """Show new findings; return the error to end the cell with, if any."""
        return self._watcher.take(self._note)

    def explain(self, error: RankError) -> None:
        """Add the findings to the error with which the cell ends."""
        self._watcher.explain(error)

    def close(self, *, is_ok: bool) -> WatchError | None:
        """The cell is over: if it succeeded, show new findings; return the error to end the cell with, if any."""
        return self._watcher.pause(self._note, is_ok=is_ok)


def as_counted(code: str) -> str:
    """Return the code of a cell without leading blank lines, so that line numbers match IPython's."""
    return "".join(dropwhile(lambda line: not line.strip(), code.splitlines(keepends=True)))
