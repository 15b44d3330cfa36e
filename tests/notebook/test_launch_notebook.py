# SPDX-License-Identifier: Apache-2.0
"""`launch` in a real Jupyter kernel: what a cell shows, its errors, the stop button."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
LIMIT_S = 60.0


@dataclass
class Shown:
    """What a cell showed."""

    streams: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})
    traceback: str = ""
    error_name: str = ""


class Notebook:
    """A kernel that runs cells one after the other."""

    def __init__(self) -> None:
        self.manager = KernelManager()
        # History is a file of the user's.
        self.manager.start_kernel(extra_arguments=["--HistoryManager.enabled=False"])
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)

    def run(self, source: str, *, interrupt_on: str | None = None) -> Shown:
        """Run a cell; press the stop button when its output contains `interrupt_on`."""
        request = self.client.execute(source, store_history=True)
        shown, end = Shown(), time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=LIMIT_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                shown.streams[content["name"]] += content["text"]
                if interrupt_on is not None and interrupt_on in shown.streams["stdout"]:
                    interrupt_on = None
                    self.manager.interrupt_kernel()
            elif kind == "error":
                shown.error_name = content["ename"]
                shown.traceback = _ANSI.sub("", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return shown
        pytest.fail(f"the cell was not done in {LIMIT_S} s; it showed {shown}")

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self.manager.context.destroy(linger=0)
        ensure_event_loop().close()  # jupyter_client made it, and leaves it open
        asyncio.set_event_loop(None)


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    """A kernel in which torch, and its OpenMP threads, were used already."""
    one = Notebook()
    try:
        used = one.run(
            "import os, time, torch, ddpilot\n"
            "weight = torch.ones(500, 500, requires_grad=True)\n"
            "(torch.ones(500, 500) @ weight).sum().backward()"
        )
        assert used.traceback == ""
        yield one
    finally:
        one.close()


STUCK = """
def stuck():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    print("I wait")
    dist.recv(torch.ones(1), src=1 - dist.get_rank())
ddpilot.Launcher(nproc_per_node=2, stop_grace_s=0.5).run(stuck)
"""

SLOW = """
def slow():
    import warnings
    warnings.warn("no data")
    while True:
        time.sleep(0.1)
ddpilot.Launcher(nproc_per_node=1, timeout_s=2).run(slow)
"""


@pytest.mark.timeout(180)
def test_stacks_of_a_timeout_and_warnings_name_the_cell(notebook: Notebook) -> None:
    """Not the file under which the kernel compiled the cell, which nobody can open."""
    ended = notebook.run(SLOW)
    assert ended.error_name == "LaunchTimeoutError"
    shown = ended.streams["stderr"]
    assert re.search(r"Cell In\[\d+\]:3: UserWarning: no data", shown), shown
    assert re.search(r"Cell In\[\d+\], line 5 in slow", shown), shown
    assert "ipykernel_" not in shown


@pytest.mark.timeout(180)
def test_launch_in_a_notebook(notebook: Notebook) -> None:
    """One kernel, cell by cell: labelled output, a value, an error with the cell's line, the stop button, a flood."""
    defined = notebook.run(
        "class Net(torch.nn.Module):\n    def forward(self, x): return x\n"
        "def train(fail):\n    print('hello from', os.environ['RANK'])\n"
        "    if fail:\n        raise ValueError('bad sample')\n    return Net()\n"
    )
    assert defined.traceback == ""
    worked = notebook.run("results = ddpilot.launch(train, False, nproc_per_node=2)\nprint(type(results[1]) is Net)")
    assert sorted(worked.streams["stdout"].splitlines()) == ["True", "[rank 0] hello from 0", "[rank 1] hello from 1"]

    # "In a notebook it renders as one readable traceback with the user's source line, not as nested launcher frames."
    failed = notebook.run("ddpilot.launch(train, True, nproc_per_node=2)")
    assert failed.error_name == "RankError"
    assert re.search(
        r"^RankError: rank \d raised ValueError: bad sample \(running `train` on 2 ranks on", failed.traceback
    )
    assert re.search(r"Cell In\[\d+\], line 6, in train\n +raise ValueError\('bad sample'\)", failed.traceback)
    assert failed.traceback.count("Traceback (most recent call last)") == 1
    assert "ipykernel_" not in failed.traceback
    assert "launching" not in failed.traceback
    caught = notebook.run(
        "try: ddpilot.launch(train, True, nproc_per_node=2)\n"
        "except ddpilot.RankError as error: print('caught', type(error.__cause__).__name__)"
    )
    assert "caught ValueError" in caught.streams["stdout"]

    # What ddpilot refuses before a rank starts is shown with the cell's line, and none of its own.
    refused = notebook.run("ddpilot.Trainer(torch.nn.Linear(1, 1), None, None, precision='fp8')")
    assert "----> 1 ddpilot.Trainer(" in refused.traceback
    assert refused.traceback.count("Error: ") == 1
    assert "checks.py" not in refused.traceback

    # "The stop button ... the notebook is usable after it."
    stopped = notebook.run(STUCK, interrupt_on="I wait")
    assert stopped.traceback.startswith("KeyboardInterrupt: the launch of `stuck` was stopped: rank 0 ")
    assert len(stopped.traceback.splitlines()) == 1
    again = notebook.run("print(list(ddpilot.launch(lambda: 1 + 1, nproc_per_node=2)))")
    assert again.streams["stdout"] == "[2, 2]\n"

    # A notebook's file is not flooded.
    flood = notebook.run("ddpilot.launch(lambda: [print('x' * 999) for _ in range(3000)] and None, nproc_per_node=1)")
    assert 1_000_000 <= len(flood.streams["stdout"]) < 1_200_000
    note = (
        r"ddpilot: [12]\.\d MB more output of rank 0 not shown \(limit 1000000 bytes per rank, `output_limit_bytes=`\)"
    )
    assert re.search(note, flood.streams["stderr"])
