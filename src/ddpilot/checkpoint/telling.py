# SPDX-License-Identifier: Apache-2.0
"""Messages about saves that failed."""

from __future__ import annotations

import errno
import shutil
import sys
from pathlib import Path

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def tell_stderr(text: str) -> None:
    """Write `text` to stderr, with the prefix "ddpilot: "."""
    sys.stderr.write(f"ddpilot: {text}\n")


def render_failure(folder: Path, failure: OSError, last: str | None) -> str:
    """Return the message for a save in `folder` that failed; `last`: the name of the last good checkpoint, if any."""
    stays = f"the last good one stays: {last}" if last else "there is none yet"
    if failure.errno == errno.ENOMEM:
        return (
            f"no checkpoint was written in {folder}: no memory for its copy ({failure}). Training continues; {stays}."
        )
    said = f"no checkpoint was written in {folder}: {failure}. Training continues; {stays}. {_free(folder)}"
    if failure.errno in _NO_ROOM:
        return f"{said} Make room, or keep fewer (`keep`)."
    return f"{said} Look at the directory and at its file system."


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB are free there."
    except OSError as error:
        return f"The directory cannot be looked at ({error.strerror})."
