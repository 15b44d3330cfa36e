# SPDX-License-Identifier: Apache-2.0
"""What is said of a rank that waits for a process which it has started."""

from __future__ import annotations

import os
import subprocess

from ddpilot.watch.explain.activity import describe_absence
from ddpilot.watch.snapshot.model import Frame, RankView, StackView
from ddpilot.watch.snapshot.processes import name_child


def test_a_rank_that_waits_for_a_child_names_it() -> None:
    """It may be anything, and no reading or writing of its own."""
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            name = name_child(os.getpid())
            assert name == f"sleep (pid {child.pid})"
        finally:
            child.kill()
    frames = (Frame("/lib/python3/subprocess.py", 9, "wait"), Frame("/home/u/train.py", 3, "main", "run(command)"))
    rank = RankView(rank=1, stack=StackView(taken_ns=1, threads={7: frames}, main=7, child=name))
    absence = describe_absence(rank, None, 2)
    assert (absence.code, absence.words) == ("DDP214", f"waits for a process that it has started: {name}")


def test_a_process_without_children_waits_for_none() -> None:
    """Nor does one that has ended."""
    with subprocess.Popen(["sleep", "60"]) as child:
        assert name_child(child.pid) == ""
        child.kill()
    assert name_child(child.pid) == ""
