# SPDX-License-Identifier: Apache-2.0
"""Wait until the kernels of newly started ranks reply and their output is received."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence

from ddpilot.errors import LaunchError
from ddpilot.findings.text import render_ranks
from ddpilot.session.kernels.events import Ended, Event, Interrupted, Said, Wrote
from ddpilot.session.kernels.io_thread import Hub

_LIMIT_S = 120.0
_SUBSCRIBE_S = 0.05
"""Seconds after its reply at which a kernel is asked again, if none of its iopub messages was received."""


def await_ready(
    hub: Hub, ranks: Sequence[int], events: queue.SimpleQueue[Event], say_end: Callable[[Ended], str | None]
) -> None:
    """Request kernel info from each of `ranks` until it has replied and one of its iopub messages was received.

    Raises LaunchError if a rank ends (`say_end` describes how; it returns None for the end of an earlier process) or
    does not reply within two minutes, and KeyboardInterrupt after an interrupt. What the ranks write is put back into
    `events`.
    """
    written = []
    waiting, heard = set(ranks), set[int]()
    did = f"starting {render_ranks(sorted(waiting))}"
    ask_again_s = dict.fromkeys(waiting, 0.0)
    limit_s = time.monotonic() + _LIMIT_S
    while waiting:
        now = time.monotonic()
        if now > limit_s:
            raise LaunchError(
                did,
                found=f"{render_ranks(sorted(waiting))} did not answer in {_LIMIT_S:g} s",
                fix="Ask for fewer ranks, or see whether the machine is out of memory",
            )
        for rank in [rank for rank in waiting if ask_again_s[rank] <= now]:
            hub.send(rank, "shell", "kernel_info_request", {})
            ask_again_s[rank] = limit_s
        with contextlib.suppress(queue.Empty):
            event = events.get(timeout=max(0.001, min([limit_s, *ask_again_s.values()]) - now))
            if isinstance(event, Said) and event.channel == "iopub":
                heard.add(event.rank)
            elif isinstance(event, Said) and event.channel == "shell" and event.rank in waiting:
                ask_again_s[event.rank] = time.monotonic() + _SUBSCRIBE_S
            elif isinstance(event, Ended) and event.rank in waiting:
                if (reason := say_end(event)) is not None:
                    raise LaunchError(did, found=f"rank {event.rank} ended: {reason}", rank=event.rank)
            elif isinstance(event, Interrupted):
                raise KeyboardInterrupt
            elif isinstance(event, Wrote):
                written.append(event)
        waiting -= {rank for rank in waiting if rank in heard and 0 < ask_again_s[rank] < limit_s}
    for event in written:
        events.put(event)
