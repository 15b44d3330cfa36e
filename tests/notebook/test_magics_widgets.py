# SPDX-License-Identifier: Apache-2.0
"""Widgets of ranks in a real Jupyter kernel, seen and driven by the front end, and the board of `%ddp status`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.notebook.kernels import Cell, Kernel, kernel_with_ranks

pytestmark = pytest.mark.timeout(120)

WIDGET = "application/vnd.jupyter.widget-view+json"
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


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel with two ranks that have widgets."""
    with kernel_with_ranks() as kernel:
        named = kernel.run("%%ddp\nimport ipywidgets\nfrom tqdm.notebook import tqdm")
        assert named.failure == ""
        yield kernel


def widgets(cell: Cell) -> list[str]:
    """Ids of the models that a cell displays."""
    return [output["data"][WIDGET]["model_id"] for output in cell.outputs if WIDGET in output.get("data", {})]


def comms(cell: Cell, kind: str) -> list[dict[str, Any]]:
    """The contents of a cell's messages of one kind."""
    return [message["content"] for _, message in cell.messages if message["msg_type"] == kind]


def test_equal_progress_bars_of_ranks_are_one(kernel: Kernel) -> None:
    """Its model, and all that is in it, are open in the front end; it ends at 100 %, and the label names both ranks."""
    cell = kernel.run("%%ddp\nfor _ in tqdm(range(7)):\n    pass")
    (shown,) = widgets(cell)
    assert cell.shown[0] == "[ranks 0,1]"
    opened = {content["comm_id"]: content["data"]["state"] for content in comms(cell, "comm_open")}
    parts = [name.removeprefix("IPY_MODEL_") for name in opened[shown]["children"]]
    assert len(parts) == 3
    assert set(parts) < set(opened)
    values = [
        content["data"]["state"]["value"]
        for content in comms(cell, "comm_msg")
        if content["comm_id"] == parts[1] and "value" in content["data"].get("state", {})
    ]
    assert values[-1] == 7.0


def test_bars_that_look_different_are_shown_for_each_rank(kernel: Kernel) -> None:
    """A bar to 7 and one to 8."""
    cell = kernel.run("%%ddp\nfor _ in tqdm(range(7 + rank)):\n    pass")
    assert len(widgets(cell)) == 2
    assert sorted(cell.shown[::2]) == ["[rank 0]", "[rank 1]"]


def test_a_widget_that_is_shown_once_drives_every_rank(kernel: Kernel) -> None:
    """Moving the slider moves that of each rank, and their output is shown although no cell runs."""
    cell = kernel.run(
        "%%ddp\nslider = ipywidgets.IntSlider(value=3)\n"
        "slider.observe(lambda change: print('now', change['new'] + rank), 'value')\nslider"
    )
    (shown,) = widgets(cell)
    moved = drive(kernel, shown, {"method": "update", "state": {"value": 40}, "buffer_paths": []})
    kernel.wait_for(lambda: set(moved.by_rank) == {0, 1}, "both ranks' lines")
    assert moved.by_rank == {0: ["now 40"], 1: ["now 41"]}
    assert kernel.run("%%ddp\nslider.value").by_rank == {0: ["40"], 1: ["40"]}


def test_a_widget_of_one_rank_drives_that_rank_alone(kernel: Kernel) -> None:
    """Buttons of two ranks that look different."""
    cell = kernel.run(
        "%%ddp\nbutton = ipywidgets.Button(description=f'rank {rank}')\n"
        "button.on_click(lambda _: print('pressed on', rank))\nbutton"
    )
    # In the order of their labels: each is shown below its own.
    which = cell.shown.index("[rank 1]") // 2
    pressed = drive(kernel, widgets(cell)[which], {"method": "custom", "content": {"event": "click"}})
    kernel.wait_for(lambda: bool(pressed.by_rank), "the button's line")
    kernel.run("%%ddp\nrank")
    assert pressed.by_rank == {1: ["pressed on 1"]}


def test_a_closed_widget_is_closed_in_the_front_end(kernel: Kernel) -> None:
    """`leave=False` takes the bar away."""
    cell = kernel.run("%%ddp\nfor _ in tqdm(range(3), leave=False):\n    pass")
    assert set(widgets(cell)) <= {content["comm_id"] for content in comms(cell, "comm_close")}


def boards(cell: Cell, display: str) -> list[str]:
    """Every state of a board, as text."""
    contents = [message["content"] for _, message in cell.messages if "display_data" in message["msg_type"]]
    return [content["data"]["text/plain"] for content in contents if content["transient"].get("display_id") == display]


def test_board_says_what_each_rank_does_and_follows_it(kernel: Kernel) -> None:
    """Idle; then, while a cell runs, waiting in a collective with the cell's line; then that the ranks were stopped."""
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


def drive(kernel: Kernel, model: str, data: dict[str, Any]) -> Cell:
    """What a person does with a widget; all that follows from it."""
    message = kernel.client.session.msg("comm_msg", {"comm_id": model, "data": data})
    kernel.cells[message["header"]["msg_id"]] = Cell()
    kernel.client.shell_channel.send(message)
    return kernel.cells[message["header"]["msg_id"]]
