# SPDX-License-Identifier: Apache-2.0
"""A session's private folder: the sockets of its kernels, readable by this user alone."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_MAX_FOLDER_CHARS = 60
"""A Unix socket's path has at most 107 characters, and a longer one kills a kernel."""


def make_folder() -> Path:
    """A new folder with mode 0700 and a short path: in the temporary directory, or in /tmp where that one is long."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) <= _MAX_FOLDER_CHARS:
            return Path(tempfile.mkdtemp(prefix="ddpilot-", dir=parent))
    return Path(tempfile.mkdtemp(prefix="ddpilot-"))


def remove_folder(folder: Path) -> None:
    """Remove it with everything in it; a second call does nothing."""
    shutil.rmtree(folder, ignore_errors=True)
