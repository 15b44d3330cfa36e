# SPDX-License-Identifier: Apache-2.0
"""Check in ``/proc`` whether a process on this machine is exiting. Linux only."""

from __future__ import annotations

from pathlib import Path

_EXITING, _DUMPING_CORE = 0x4, 0x200
"""The Linux kernel's PF_EXITING and PF_DUMPCORE flags (include/linux/sched.h)."""


def is_ending(pid: int) -> bool:
    """True if the process is exiting or gone, which can precede any report of it. Always False without ``/proc``."""
    if not Path("/proc/self/stat").exists():
        return False
    try:
        # The process name may contain anything, so parse what follows it: the state, then numbers (index 6: the flags).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & (_EXITING | _DUMPING_CORE))
