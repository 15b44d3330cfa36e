# SPDX-License-Identifier: Apache-2.0
"""What the system says of a process before anybody else does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ddpilot.launching.processes import is_ending

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_is_ending_tells_processes_that_live_from_those_that_are_gone() -> None:
    """Also from one that nobody has waited for yet."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not is_ending(os.getpid())
        assert not is_ending(child.pid)
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_ending(child.pid)
    assert is_ending(child.pid)
