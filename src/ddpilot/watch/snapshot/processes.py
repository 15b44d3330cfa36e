# SPDX-License-Identifier: Apache-2.0
"""Read the state of a rank's process from the operating system."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import psutil

from ddpilot.watch.snapshot.model import ProcessView

_HOST = platform.node()


def look_at(pid: int, host: str = _HOST) -> ProcessView:
    """Return the state of process `pid`: running, ended (exit status unknown), or unknown on a different host."""
    if host != _HOST:
        return ProcessView(pid=pid, host=host, state="unknown")
    try:
        # The first field after the process name, which may contain any character.
        os_state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        state = "ended" if Path("/proc/self/stat").exists() else "unknown"
        return ProcessView(pid=pid, host=_HOST, state=state)  # type: ignore[arg-type]
    return ProcessView(pid=pid, host=_HOST, state="ended" if os_state in "ZX" else "running", os_state=os_state)


def name_child(pid: int) -> str:
    """Return the newest child process of `pid`, such as ``rsync (pid 4711)``; empty if there is none.

    Copies of the process itself, such as DataLoader workers, are not included.
    """
    found = []
    try:
        parent = psutil.Process(pid)
        own = parent.cmdline()
        for child in parent.children():
            with suppress(psutil.Error):  # it has ended in the meantime
                words = child.cmdline()
                if words and words != own and not any(word.startswith("from multiprocessing") for word in words):
                    found.append((child.create_time(), f"{child.name()} (pid {child.pid})"))
    except psutil.Error:
        return ""
    return max(found)[1] if found else ""
