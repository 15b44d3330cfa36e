# SPDX-License-Identifier: Apache-2.0
"""What the operating system says of a rank's process, while it runs."""

from __future__ import annotations

import platform
from pathlib import Path

from ddpilot.watch.view import ProcessView

_HOST = platform.node()


def look_at(pid: int) -> ProcessView:
    """The process `pid` of this machine: running, ended (nobody can say how), or unknown where that cannot be seen."""
    try:
        # The first field after the name, which may hold anything.
        os_state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        state = "ended" if Path("/proc/self/stat").exists() else "unknown"
        return ProcessView(pid=pid, host=_HOST, state=state)  # type: ignore[arg-type]
    return ProcessView(pid=pid, host=_HOST, state="ended" if os_state in "ZX" else "running", os_state=os_state)
