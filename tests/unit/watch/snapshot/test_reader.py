# SPDX-License-Identifier: Apache-2.0
"""The child process that a rank waits for."""

from __future__ import annotations

import os
import subprocess

from ddpilot.user_files import CodeLine
from ddpilot.watch.explain.activity import describe_activity
from ddpilot.watch.snapshot.model import PythonStack, RankSnapshot
from ddpilot.watch.snapshot.reader import name_child


def test_a_rank_that_waits_for_a_child_names_it() -> None:
    """It may be anything, and no reading or writing of its own."""
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            name = name_child(os.getpid())
            assert name == f"sleep (pid {child.pid})"
        finally:
            child.kill()
    frames = (
        CodeLine("/lib/python3/subprocess.py", 9, "wait"),
        CodeLine("/home/u/train.py", 3, "main", "run(command)"),
    )
    rank = RankSnapshot(rank=1, stack=PythonStack(taken_ns=1, frames=frames, child=name))
    activity = describe_activity(rank, None, 2)
    assert (activity.code, activity.words) == ("DDP214", f"waits for a child process: {name}")


def test_a_process_without_children_waits_for_none() -> None:
    """Nor does one that has ended."""
    with subprocess.Popen(["sleep", "60"]) as child:
        assert name_child(child.pid) == ""
        child.kill()
    assert name_child(child.pid) == ""
