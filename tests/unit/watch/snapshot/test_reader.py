# SPDX-License-Identifier: Apache-2.0
"""How long what is read of a rank is taken for its present state."""

from __future__ import annotations

import os
from pathlib import Path

from ddpilot.environments.private_files import write_own_text
from ddpilot.record.connecting import connecting_path
from ddpilot.watch.snapshot.model import ProcessView
from ddpilot.watch.snapshot.reader import Gatherer, RankFacts


def test_a_stack_that_a_rank_wrote_as_it_connected_is_valid_for_one_look(tmp_path: Path) -> None:
    """A rank that sleeps afterwards was reported to be in init_process_group still."""
    gatherer = Gatherer(tmp_path, 1, (0,), "job")
    facts = {0: RankFacts(process=ProcessView(pid=os.getpid(), state="running"))}
    write_own_text(connecting_path(tmp_path, 0), '  File "train.py", line 3 in main\n')
    view = gatherer.add_stacks(gatherer.gather(facts), (0,))
    stack = view.ranks[0].stack
    assert stack is not None
    assert [frame.line for frame in stack.main_frames] == [3]
    assert gatherer.gather(facts).ranks[0].stack is None
