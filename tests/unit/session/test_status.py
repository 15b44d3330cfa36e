# SPDX-License-Identifier: Apache-2.0
"""Resource usage of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from ddpilot.session.status import collect_usage, describe_stack
from ddpilot.user_files import CodeLine

# Has 20 MB of its own and rests; its child has as much and never rests.
FAMILY = """
import os, signal
mine = bytearray(b"p" * 20_000_000)
parent_end, child_end = os.pipe()
if os.fork() == 0:
    mine[:] = b"c" * len(mine)
    os.write(child_end, b"x")
    while True: pass
os.read(parent_end, 1)
print("ready", flush=True)
signal.pause()
"""


def test_collect_usage_counts_children_and_leaves_out_ended_processes() -> None:
    """A resting process uses the core and the memory that its child does; a pid without process is absent."""
    argv = [sys.executable, "-S", "-c", FAMILY]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as family:
        try:
            assert family.stdout is not None
            assert family.stdout.readline() == b"ready\n"
            gone = 2**22 + 1
            # Time on a core is counted in hundredths of a second, of which a busy machine may give it none at first.
            for _ in range(100):
                used = collect_usage([family.pid, gone], interval_s=0.02)
                if used[family.pid]["cpu_percent"] > 0:
                    break
        finally:
            os.killpg(family.pid, signal.SIGKILL)
    assert set(used) == {family.pid}
    assert used[family.pid]["cpu_percent"] > 0
    assert 40e6 < used[family.pid]["memory_bytes"] < 80e6
    assert used[family.pid]["gpu_percent"] is None


def test_collect_usage_of_no_process_takes_no_time() -> None:
    """Without processes there is nothing to wait for."""
    assert collect_usage([], interval_s=3600) == {}


KERNEL = (
    CodeLine("/site-packages/IPython/core/interactiveshell.py", 3823, "run_code"),
    CodeLine("/site-packages/ddpilot/session/rank/kernel.py", 73, "do_execute"),
    CodeLine("<string>", 1, "<module>"),
)


def test_describe_stack_keeps_the_frames_down_to_the_cell() -> None:
    """What the cell called is kept, what called the cell is not; also where a cell's function calls another's."""
    frames = (
        CodeLine("/site-packages/torch/distributed/distributed_c10d.py", 5356, "barrier"),
        CodeLine("Cell In[2]", 3, "inner"),
        CodeLine("/lib/python/functools.py", 9, "wrapper"),
        CodeLine("Cell In[7]", 4, "<module>"),
    )
    lines = describe_stack((*frames, *KERNEL)).splitlines()
    assert len(lines) == 4
    assert lines[0].endswith("in barrier")
    assert lines[-1] == '  File "Cell In[7]", line 4 in <module>'


def test_describe_stack_keeps_what_a_function_that_was_sent_does() -> None:
    """A call has no cell: everything above ddpilot's own frames is the user's."""
    frames = (CodeLine("train.py", 8, "train"), CodeLine("/x/ddpilot/session/rank/requests.py", 72, "_call"))
    assert describe_stack((*frames, *KERNEL)) == '  File "train.py", line 8 in train'


def test_describe_stack_of_an_idle_rank_and_of_one_that_does_not_answer() -> None:
    """A kernel that waits for a cell, and a process that wrote nothing."""
    assert describe_stack(KERNEL) == "idle"
    assert describe_stack(()).startswith("no answer")
