# SPDX-License-Identifier: Apache-2.0
"""The private folder of a session: sockets and other files of its kernels, readable by this user only."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_MAX_FOLDER_CHARS = 60
"""Longest parent folder to use: the path of a Unix socket is limited to 107 characters."""


def make_folder() -> Path:
    """Create a folder with mode 0700 in the temporary directory, or in /tmp if the path of that one is long."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) <= _MAX_FOLDER_CHARS:
            return Path(tempfile.mkdtemp(prefix="ddpilot-", dir=parent))
    return Path(tempfile.mkdtemp(prefix="ddpilot-"))


def remove_folder(folder: Path) -> None:
    """Remove the folder and its contents; do nothing if it does not exist."""
    shutil.rmtree(folder, ignore_errors=True)
