# SPDX-License-Identifier: Apache-2.0
"""Write the TCP connections of a rank that could not form a process group to its output, next to the error."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Sequence

_FORMING = ("init_process_group", "new_group")
_MAX_CONNECTIONS = 20


def show_connections(error: BaseException) -> None:
    """Write this process's TCP connections to stderr if `error` was raised while torch formed a process group."""
    if not any(frame.f_code.co_name in _FORMING for frame, _ in traceback.walk_tb(error.__traceback__)):
        return
    import psutil

    with contextlib.suppress(psutil.Error, OSError, ValueError):  # only adds to the error, which is reported anyway
        found = psutil.Process().net_connections(kind="tcp")
        rows = [_render(each.laddr, each.raddr, each.status) for each in found[:_MAX_CONNECTIONS]]
        more = f" and {len(found) - len(rows)} more" if len(found) > len(rows) else ""
        sys.stderr.write(f"ddpilot: TCP connections of this rank: {'; '.join(rows) or 'none'}{more}\n")


def _render(near: Sequence[object], far: Sequence[object], status: str) -> str:
    """Format both ends as host:port, and the state; a listening socket has no remote end."""
    ends = [f"{end[0]}:{end[1]}" for end in (near, far) if end]
    return f"{' to '.join(ends)} {status}"
