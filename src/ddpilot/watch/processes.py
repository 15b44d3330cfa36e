# SPDX-License-Identifier: Apache-2.0
"""What the operating system says of a rank's process, while it runs."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ddpilot.watch.view import ProcessView

_HOST = platform.node()


def look_at(pid: int) -> ProcessView:
    """The process `pid` of this machine: running, ended (nobody can say how), or unknown where that cannot be seen."""
    try:
        # After the name, which may hold anything: the state first, the 12th and 13th further on times in clock ticks.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        state = "ended" if Path("/proc/self/stat").exists() else "unknown"
        return ProcessView(pid=pid, host=_HOST, state=state)  # type: ignore[arg-type]
    ticks = os.sysconf("SC_CLK_TCK")
    return ProcessView(
        pid=pid,
        host=_HOST,
        state="ended" if fields[0] in "ZX" else "running",
        cpu_s=(int(fields[11]) + int(fields[12])) / ticks,
        os_state=fields[0],
    )
