# SPDX-License-Identifier: Apache-2.0
"""What the operating system says of a rank's process, while it runs."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import psutil

from ddpilot.watch.view import ProcessView

_HOST = platform.node()


def look_at(pid: int, host: str = _HOST) -> ProcessView:
    """The process `pid` of `host`: running, ended (nobody can say how), or unknown if that cannot be seen from here."""
    if host != _HOST:
        return ProcessView(pid=pid, host=host, state="unknown")
    try:
        # The first field after the name, which may hold anything.
        os_state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        state = "ended" if Path("/proc/self/stat").exists() else "unknown"
        return ProcessView(pid=pid, host=_HOST, state=state)  # type: ignore[arg-type]
    return ProcessView(pid=pid, host=_HOST, state="ended" if os_state in "ZX" else "running", os_state=os_state)


def name_child(pid: int) -> str:
    """The program that the process `pid` has started last, such as ``rsync (pid 4711)``; empty if there is none.

    Copies of itself, such as workers of a DataLoader, do not count.
    """
    found = []
    try:
        parent = psutil.Process(pid)
        own = parent.cmdline()
        for child in parent.children():
            with suppress(psutil.Error):  # it has ended meanwhile
                words = child.cmdline()
                if words and words != own and not any(word.startswith("from multiprocessing") for word in words):
                    found.append((child.create_time(), f"{child.name()} (pid {child.pid})"))
    except psutil.Error:
        return ""
    return max(found)[1] if found else ""
