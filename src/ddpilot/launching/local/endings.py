# SPDX-License-Identifier: Apache-2.0
"""What a launch raises that ends by no rank's failure: its server, its store, a start, its time."""

from __future__ import annotations

from collections.abc import Sequence

from ddpilot.errors import LaunchError, LaunchTimeoutError
from ddpilot.findings.words import render_ranks
from ddpilot.launching.local.handles import RankHandle
from ddpilot.launching.local.jobs import NotStarted
from ddpilot.launching.local.report import Exited

_KILLED = "If nobody killed it, the kernel's OOM killer is the usual cause; launch again"


def server_ended(function_name: str) -> LaunchError:
    """The rank server is gone."""
    return LaunchError(f"running `{function_name}`", found="the rank server ended, and the ranks with it", fix=_KILLED)


def store_ended(function_name: str, exited: Exited) -> LaunchError:
    """The process of the store is gone."""
    return LaunchError(
        f"running `{function_name}`",
        found=f"the process of its store ended with code {exited.exitcode}, and ranks cannot meet without it",
        fix=_KILLED,
    )


def not_started(function_name: str, message: NotStarted) -> LaunchError:
    """A rank could not be started."""
    return LaunchError(
        f"starting rank {message.rank} of `{function_name}`",
        found=message.reason,
        fix="Ask for fewer ranks, or free memory or processes (`ulimit -u`)",
    )


def timed_out(function_name: str, handles: Sequence[RankHandle], timeout_s: float | None) -> LaunchTimeoutError:
    """The time is over; what the ranks of `handles` were doing is said."""
    late = [handle.rank for handle in handles if handle.returned is None]
    exiting = [handle.rank for handle in handles if handle.returned is not None and handle.is_live]
    states = [f"{render_ranks(late)} had not returned"] * bool(late)
    states += [f"{render_ranks(exiting)} had returned and still ran a thread or an exit handler"] * bool(exiting)
    return LaunchTimeoutError(
        f"running `{function_name}` on {len(handles)} ranks",
        found=f"{', '.join(states)} after `timeout_s={timeout_s}`",
        fix="Their Python stacks are in the output above; raise the limit if they were only slow",
    )
