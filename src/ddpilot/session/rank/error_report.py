# SPDX-License-Identifier: Apache-2.0
"""Build the report on an exception with which a cell or call ended."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddpilot.launching.exception_report import report_exception
from ddpilot.record.flight_ring.log import count_by_group
from ddpilot.session.protocol.messages import Report

CELL = "Cell In["
_UNKNOWN_GROUP = "is not initialized in the world group map"
_TWICE = "trying to initialize the default process group twice"


def report_error(
    error: BaseException, text: str, time_s: float, num_collectives: int | None, device: torch.device
) -> Report:
    """Return the report of a cell or call that ended with `error` and the traceback `text` on a rank with `device`."""
    raised = replace(
        report_exception(error, text or "".join(traceback.format_exception_only(error))),
        time_s=time_s,
        interrupted=isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)),
    )
    return Report(
        raised=replace(raised, message=_explain(raised.message)),
        **group_state(),
        num_collectives=num_collectives,
        in_backward=came_from_backward(error),
        device_error=find_device_error(device),
    )


def _explain(message: str) -> str:
    if _UNKNOWN_GROUP in message:
        return f"{message} It was made on a process group that was rebuilt since: run the cells that made it again"
    if _TWICE not in message:
        return message
    return (
        f"{message} The session enters the group at the first collective: leave `init_process_group` out, or call "
        "`group.leave()` before it"
    )


def group_state() -> dict[str, Any]:
    """Return a report's fields about process groups: if the rank is in one, how many there are, and their counts."""
    world = c10d._world
    return {
        "has_group": dist.is_initialized(),
        "num_groups": len(world.pg_map),
        "num_group_names": world.group_count,
        "group_counts": count_by_group(),
    }


def came_from_backward(error: BaseException | None) -> bool:
    """True if `error`, or an exception that it was raised from, went through autograd's engine."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if any(frame.f_code.co_name == "_engine_run_backward" for frame, _ in traceback.walk_tb(error.__traceback__)):
            return True
        error = error.__cause__ or error.__context__
    return False


def holds_group(error: BaseException | None) -> bool:
    """True if `error` or its context is an exception group. Checked by name, as Python 3.10 has no exception groups."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if any(kind.__name__ == "BaseExceptionGroup" for kind in type(error).__mro__):
            return True
        error = error.__context__
    return False


def find_device_error(device: torch.device) -> str:
    """Return the error with which `device` answers every call in this process; "" if it works, or was not used.

    Does not wait for the device: a kernel that is still queued may fail later.
    """
    if device.type == "cpu":
        return ""
    module = torch.get_device_module(device)
    for name, wanted in (("is_initialized", True), ("is_current_stream_capturing", False)):
        ask = getattr(module, name, None)
        if ask is not None and bool(ask()) is not wanted:
            return ""
    try:
        torch.accelerator.current_stream(device).query()
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    return ""
