# SPDX-License-Identifier: Apache-2.0
"""Errors of launches that end for a reason other than a rank's failure: lost server or store, failed start, timeout."""

from __future__ import annotations

from collections.abc import Sequence

from ddpilot.errors import LaunchError, LaunchTimeoutError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.rank_reports import Exited
from ddpilot.launching.rank_server.handles import RankHandle
from ddpilot.launching.rank_server.job import NotStarted

_KILLED = "If nobody killed it, the kernel's OOM killer is the usual cause; launch again"


def server_ended(function_name: str) -> LaunchError:
    """Error: the rank server exited."""
    return LaunchError(f"running `{function_name}`", found="the rank server ended, and the ranks with it", fix=_KILLED)


def store_ended(function_name: str, exited: Exited) -> LaunchError:
    """Error: the store's process exited."""
    return LaunchError(
        f"running `{function_name}`",
        found=f"the process of its store ended with code {exited.exitcode}, and ranks cannot meet without it",
        fix=_KILLED,
    )


def not_started(function_name: str, message: NotStarted) -> LaunchError:
    """Error: a rank's process could not be started."""
    return LaunchError(
        f"starting rank {message.rank} of `{function_name}`",
        found=message.reason,
        fix="Ask for fewer ranks, or free memory or processes (`ulimit -u`)",
    )


def timed_out(function_name: str, handles: Sequence[RankHandle], timeout_s: float | None) -> LaunchTimeoutError:
    """Error: `timeout_s` has passed. Reports which ranks had not returned or not exited."""
    late = [handle.rank for handle in handles if handle.returned is None]
    exiting = [handle.rank for handle in handles if handle.returned is not None and handle.is_live]
    states = [f"{render_ranks(late)} had not returned"] * bool(late)
    states += [f"{render_ranks(exiting)} had returned and still ran a thread or an exit handler"] * bool(exiting)
    return LaunchTimeoutError(
        f"running `{function_name}` on {len(handles)} ranks",
        found=f"{', '.join(states)} after `timeout_s={timeout_s}`",
        fix="Their Python stacks are in the output above; raise the limit if they were only slow",
    )
