# SPDX-License-Identifier: Apache-2.0
"""Ends of processes that are received late, after the rank was restarted under the same number."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddpilot.errors import LaunchError
from ddpilot.launching.spawning import Ended
from ddpilot.session.kernels.event_router import Event, KernelMessage
from ddpilot.session.kernels.manager import await_ready
from ddpilot.session.kernels.output import IdleOutput
from ddpilot.session.kernels.states import RankStates

END = Ended(1, None, "was killed")


def said(channel: str) -> KernelMessage:
    """A message of rank 1."""
    return KernelMessage(rank=1, channel=channel, kind="", parent_id="", content={}, metadata={}, buffers=[], header={})


def test_await_ready_ignores_the_end_of_an_earlier_process() -> None:
    """The end of the new process is an error."""
    io_thread = cast("Any", SimpleNamespace(send=lambda *_sent: "id"))
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for event in (END, said("iopub"), said("shell")):
        events.put(event)
    await_ready(io_thread, [1], events, lambda _ended: None)
    events.put(END)
    with pytest.raises(LaunchError, match="rank 1 ended: was killed"):
        await_ready(io_thread, [1], events, lambda ended: ended.reason)


def test_idle_output_does_not_show_the_end_of_a_rank_that_was_restarted() -> None:
    """Until it dies again."""
    notes: list[str] = []
    states = RankStates(2)
    view, processes = SimpleNamespace(note=notes.append), SimpleNamespace(can_start=True)
    idle_output = IdleOutput(cast("Any", view), cast("Any", processes), states, respawns=False)
    idle_output.show(END)
    assert notes == []
    states.note_end(END, ())
    idle_output.show(END)
    assert notes == ["rank 1 was killed; its variables are lost, `%ddp restart 1` brings it back"]
