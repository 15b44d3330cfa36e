# SPDX-License-Identifier: Apache-2.0
"""What a forked rank makes of itself before the user's code."""

from __future__ import annotations

import subprocess
import sys

ENDING = """
import faulthandler, os
from ddpilot.launching.rank_server.process import STACKS_SIGNAL, write_to

write_to(os.dup(1), os.dup(2))
os.kill(os.getpid(), STACKS_SIGNAL)
faulthandler.unregister(STACKS_SIGNAL)  # as Python does when it ends
os.kill(os.getpid(), STACKS_SIGNAL)
"""


def test_rank_that_is_asked_for_its_stack_while_it_ends_is_not_killed() -> None:
    """The stack is printed while Python can; afterwards the question is passed over."""
    done = subprocess.run([sys.executable, "-c", ENDING], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("most recent call first") == 1
