# SPDX-License-Identifier: Apache-2.0
"""Read the new entries of a rank's journal repeatedly."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from ddpilot.errors import RecordError
from ddpilot.record.journal import Entry, read_journal
from ddpilot.watch.snapshot.files import describe_fault

NUM_HELD = 512
"""Number of a rank's newest entries that are kept."""


class JournalReader:
    """Reads the journal at `path` incrementally. `held`: its newest entries, oldest first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._after = self._pid = 0
        self.held: deque[Entry] = deque(maxlen=NUM_HELD)
        self.fault = ""
        """Why the journal can no longer be read; empty if it can."""

    def read(self) -> tuple[Entry, ...]:
        """Return the entries since the last call; empty if there is no journal (yet)."""
        try:
            journal = read_journal(self._path, after=self._after)
            if journal.pid != self._pid and self._after:  # the rank was restarted
                journal = read_journal(self._path)
        except (RecordError, OSError) as error:
            self.fault = describe_fault(error, has_been_read=self._pid > 0)
            return ()
        self.fault = ""
        entries = journal.entries
        self._after = max((entry.index for entry in entries), default=self._after if journal.pid == self._pid else 0)
        self._pid = journal.pid
        self.held.extend(entries)
        return entries
