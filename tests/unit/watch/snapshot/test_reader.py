# SPDX-License-Identifier: Apache-2.0
"""How long what is read of a rank is taken for its present state."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ddpilot.environments.private_files import write_own_text
from ddpilot.record.main_thread import connecting_path
from ddpilot.user_files import CodeLine
from ddpilot.watch.explain.activity import describe_activity
from ddpilot.watch.snapshot.model import ProcessState, PythonStack, RankSnapshot
from ddpilot.watch.snapshot.reader import RankFacts, SnapshotReader, name_child


def test_a_stack_that_a_rank_wrote_as_it_connected_is_valid_for_one_look(tmp_path: Path) -> None:
    """A rank that sleeps afterwards was reported to be in init_process_group still."""
    reader = SnapshotReader(tmp_path, 1, (0,), "job")
    facts = {0: RankFacts(process=ProcessState(pid=os.getpid(), state="running"))}
    write_own_text(connecting_path(tmp_path, 0), '  File "train.py", line 3 in main\n')
    view = reader.add_stacks(reader.read(facts), (0,))
    stack = view.ranks[0].stack
    assert stack is not None
    assert [frame.line for frame in stack.frames] == [3]
    assert reader.read(facts).ranks[0].stack is None


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
