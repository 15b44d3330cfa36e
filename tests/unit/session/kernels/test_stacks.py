# SPDX-License-Identifier: Apache-2.0
"""Stacks of ranks are cut down to what the user wrote."""

from __future__ import annotations

from ddpilot.session.kernels.stacks import trim_stack

KERNEL = """\
  File "/site-packages/IPython/core/interactiveshell.py", line 3823 in run_code
  File "/site-packages/ddpilot/session/rank/kernel.py", line 73 in do_execute
  File "<string>", line 1 in <module>
"""


def test_trim_stack_keeps_the_frames_down_to_the_cell() -> None:
    """What the cell called is kept, what called the cell is not; also where a cell's function calls another's."""
    text = (
        "Stack (most recent call first):\n"
        '  File "/site-packages/torch/distributed/distributed_c10d.py", line 5356 in barrier\n'
        '  File "Cell In[2]", line 3 in inner\n  File "/lib/python/functools.py", line 9 in wrapper\n'
        '  File "Cell In[7]", line 4 in <module>\n' + KERNEL
    )
    lines = trim_stack(text).splitlines()
    assert len(lines) == 4
    assert lines[0].endswith("in barrier")
    assert lines[-1] == '  File "Cell In[7]", line 4 in <module>'


def test_trim_stack_keeps_what_a_function_that_was_sent_does() -> None:
    """A call has no cell: everything above ddpilot's own frames is the user's."""
    text = (
        'Stack (most recent call first):\n  File "train.py", line 8 in train\n'
        '  File "/x/ddpilot/session/rank/requests.py", line 72 in _call\n' + KERNEL
    )
    assert trim_stack(text) == '  File "train.py", line 8 in train'


def test_trim_stack_says_idle_and_no_answer() -> None:
    """A kernel that waits for a cell, and a process that wrote nothing."""
    assert trim_stack("Stack (most recent call first):\n" + KERNEL) == "idle"
    assert trim_stack("").startswith("no answer")
