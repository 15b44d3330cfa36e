# SPDX-License-Identifier: Apache-2.0
"""A launch in a real Jupyter kernel whose ranks do not get on: reported, by the cell's name, and it goes on."""

from __future__ import annotations

import pytest

from tests.notebook.test_launch_notebook import Notebook, notebook

__all__ = ["notebook"]

DEFINE = """
def differ():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    total = torch.ones(1)
    dist.all_reduce(total, op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)
    return "came through"
# The rank server imports torch's compiler when it is idle, and hears of the kernel's end after that: at once, then.
options = {"nproc_per_node": 2, "preload": ("torch._dynamo",)}
"""


@pytest.mark.timeout(180)
def test_launch_in_a_notebook_reports_by_default_and_stops_when_told_to(notebook: Notebook) -> None:
    """In words that name the cell; with "stop" the finding is the error."""
    assert notebook.run(DEFINE).traceback == ""
    shown = notebook.run("print(list(ddpilot.Launcher(**options).run(differ)))")
    assert shown.traceback == ""
    assert shown.streams["stdout"] == "['came through', 'came through']\n"
    assert "ddpilot: reduce-op-mismatch  DDP204" in shown.streams["stderr"]
    lines = shown.streams["stderr"].splitlines()
    assert [line for line in lines if "Cell In[2]:6" in line], lines
    stopped = notebook.run("ddpilot.Launcher(**options, on_finding='stop').run(differ)")
    assert stopped.error_name == "WatchError"
    assert "DDP204" in stopped.traceback
