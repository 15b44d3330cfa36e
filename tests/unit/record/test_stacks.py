# SPDX-License-Identifier: Apache-2.0
"""A process that writes its stack when it is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ENDING = """
import faulthandler, os, sys
from pathlib import Path
from ddpilot.record.stacks import WATCH_SIGNAL, answer_with_stacks

answer_with_stacks(Path(sys.argv[1]))
os.kill(os.getpid(), WATCH_SIGNAL)
faulthandler.unregister(WATCH_SIGNAL)  # as Python does when it ends
os.kill(os.getpid(), WATCH_SIGNAL)
"""


def test_being_asked_while_it_ends_does_not_kill_a_process(tmp_path: Path) -> None:
    """Who asks cannot know that the answer is being taken back: the process ends as it would have."""
    done = subprocess.run([sys.executable, "-c", ENDING, str(tmp_path / "stacks")], check=False, timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "stacks").read_text().count("most recent call first") == 1
