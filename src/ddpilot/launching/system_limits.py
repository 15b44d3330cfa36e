# SPDX-License-Identifier: Apache-2.0
"""Detect system limits that a launch can reach (open files, file size, processes, disk space) and how to raise them."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from ddpilot.errors import LaunchError

_FREE_SPACE = "Free space there, or set TMPDIR to a directory with more"
_FIXES = {
    errno.ENFILE: "The whole machine has no file descriptors left: close programs, or raise fs.file-max",
    errno.EFBIG: "Raise the limit of file sizes: `ulimit -f unlimited` in the shell that starts Python",
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.ENOMEM: "Free memory, or ask for fewer ranks",
    errno.EAGAIN: "Raise the limit of processes, `ulimit -u`, or ask for fewer ranks",
}
_NO_TEMPORARY = "No usable temporary directory"  # prefix of tempfile's message


_FILES_OF_SESSION, _FILES_OF_RANK = 16, 11
"""Files that the parent of a session opens: in total, and per rank."""

_FILES_IN_RANK = 64
"""Files open in a session's rank before training; each rank of its group adds one."""


def check_open_files(did: str, num_ranks: int) -> None:
    """Raise LaunchError if RLIMIT_NOFILE is too low for a session of `num_ranks`, in this process or in the ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/dev/fd"))
    num_needed = max(num_open + _FILES_OF_SESSION + _FILES_OF_RANK * num_ranks, _FILES_IN_RANK + num_ranks)
    if soft == resource.RLIM_INFINITY or soft >= num_needed:
        return
    advised, where = max(1024, 2 * num_needed), "in the shell that starts Python"
    fix = f"Run `ulimit -n {advised}` {where}, or ask for fewer ranks"
    if hard != resource.RLIM_INFINITY and hard < num_needed:
        fix = (
            f"The hard limit is {hard}: have it raised (limits.conf, systemd, `docker run --ulimit nofile={advised}`), "
        )
        fix += "or ask for fewer ranks"
    elif hard != resource.RLIM_INFINITY and hard < advised:
        fix = f"Run `ulimit -n {hard}` {where} (the hard limit is {hard}), or ask for fewer ranks"
    raise LaunchError(
        did,
        found=f"this process may have {soft} files open at a time (RLIMIT_NOFILE), {num_open} are open, and "
        f"{num_ranks} rank{'s' * (num_ranks > 1)} need about {num_needed} in all",
        fix=fix,
    )


def explain_limit(did: str, error: OSError) -> LaunchError | None:
    """The LaunchError that explains `error`; None if `error` is not about a limit."""
    found, fix = f"{error.strerror or error}", _FIXES.get(error.errno or 0)
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        found = f"too many open files: this process may have {soft} open at a time"
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        fix = (
            f"Raise `ulimit -n` in the shell that starts Python (at most {most} here), close what is not needed, "
            "or ask for fewer ranks"
        )
    elif str(error.strerror).startswith(_NO_TEMPORARY):
        fix = "Set TMPDIR to a directory that exists, can be written to, and has space left"
    return None if fix is None else LaunchError(did, found=found, fix=fix)


@contextlib.contextmanager
def limits_explained(did: str) -> Iterator[None]:
    """Context manager that replaces an OSError about a limit with a LaunchError, chained."""
    try:
        yield
    except OSError as error:
        explained = explain_limit(did, error)
        if explained is None:
            raise
        raise explained from error
