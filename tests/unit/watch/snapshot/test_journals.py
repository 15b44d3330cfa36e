# SPDX-License-Identifier: Apache-2.0
"""A journal that is read again and again, also when its rank is started anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ddpilot.record.journal import JournalWriter
from ddpilot.watch.snapshot.journals import JournalReader


def test_journal_reader_gives_each_entry_once_and_begins_anew_with_a_new_process(tmp_path: Path) -> None:
    """The second process counts its entries from 1 again, and all of them are read."""
    path = tmp_path / "rank0.journal"
    reader = JournalReader(path)
    assert reader.read() == ()
    code = (
        "import sys; from ddpilot.record.journal import JournalWriter\n"
        "writer = JournalWriter(sys.argv[1], rank=0)\n"
        "for number in range(3): writer.write('first', {})\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=20)
    assert [entry.index for entry in reader.read()] == [1, 2, 3]
    assert reader.read() == ()
    writer = JournalWriter(path, rank=0)
    assert reader.read() == ()
    writer.write("second", {})
    assert [(entry.index, entry.kind) for entry in reader.read()] == [(1, "second")]
    writer.write("second", {})
    assert [entry.index for entry in reader.read()] == [2]
