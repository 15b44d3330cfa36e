# SPDX-License-Identifier: Apache-2.0
"""`%ddp status` in a real Jupyter kernel: the board once, and one that is updated."""

from __future__ import annotations

import re

import pytest

from tests.notebook.kernels import Cell, kernel_with_ranks

WAITS = """%%ddp
import time, torch
import torch.distributed as dist
dist.all_reduce(torch.ones(1))
if rank == 0:
    dist.all_reduce(torch.ones(1))
else:
    time.sleep(5)
    dist.all_reduce(torch.ones(1))
"""


def boards(cell: Cell, display: str) -> list[str]:
    """Every state of a board, as text."""
    contents = [message["content"] for _, message in cell.messages if "display_data" in message["msg_type"]]
    return [content["data"]["text/plain"] for content in contents if content["transient"].get("display_id") == display]


@pytest.mark.timeout(120)
def test_board_says_what_each_rank_does_and_follows_it() -> None:
    """Idle; then, while a cell runs, waiting in a collective with the cell's line; then that the ranks were stopped."""
    with kernel_with_ranks() as kernel:
        once = kernel.run("%ddp status")
        (text,) = once.shown
        assert re.search(r"^2 ranks: 2 idle\n.*\n +0 +\d+ +\d+ % +\d+ MB  idle\n +1 ", text)
        assert "<script" not in once.outputs[0]["data"]["text/html"]

        live = kernel.run("%ddp status --live")
        display = live.outputs[0]["id"]
        busy = kernel.run(WAITS)
        # Updates come as the cell's that runs, and change the display of the one above.
        seen = boards(busy, display)
        assert len(seen) >= 2
        waiting = re.compile(r"^ +0 .* waiting in all_reduce for \d s at Cell In\[\d+\]:6 ", re.MULTILINE)
        assert any(waiting.search(state) for state in seen), seen
        assert any(re.search(r"^ +1 .* in cell \d+ for \d s$", state, re.MULTILINE) for state in seen), seen
        kernel.wait_for(lambda: live.shown[0].startswith("2 ranks: 2 idle"), "the board of idle ranks")

        assert kernel.run("%ddp status --stop").stdout == "ddpilot: the status board is no longer updated\n"
        assert kernel.run("%ddp status --stop").stdout == "ddpilot: no status board is being updated\n"
        last = kernel.run("%ddp status --live")
        kernel.run("%ddp stop")
        assert (live.shown[0][:16], last.shown) == ("2 ranks: 2 idle\n", ["the ranks were stopped"])
        threads = kernel.run("import threading; [each.name for each in threading.enumerate()]")
        assert "ddpilot" not in threads.shown[0]
        assert "no ranks are running" in kernel.run("%ddp status").error
