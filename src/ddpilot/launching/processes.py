# SPDX-License-Identifier: Apache-2.0
"""What the system knows of another process of this machine, before anybody else says so. Linux; else nothing."""

from __future__ import annotations

from pathlib import Path

_EXITING, _DUMPING_CORE = 0x4, 0x200
"""The kernel's PF_EXITING and PF_DUMPCORE (include/linux/sched.h)."""


def is_ending(pid: int) -> bool:
    """Whether the process is on its way out, or gone: its connections may be closed before anybody is told."""
    if not Path("/proc/self/stat").exists():
        return False
    try:
        # After the name, which may hold anything: state, and from the eighth of the numbers the flags.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & (_EXITING | _DUMPING_CORE))
