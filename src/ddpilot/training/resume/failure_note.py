# SPDX-License-Identifier: Apache-2.0
"""Note the update and the error of the first rank that raises, so that a job script can tell a repeated failure."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from types import TracebackType

from ddpilot.errors import RemoteRankError
from ddpilot.launching.exception_report import is_victim
from ddpilot.launching.rank_environment import FAILURE_FILE_VARIABLE

_VICTIM_WAIT_S = 2.0
_MAX_CHARACTERS = 500
_ADDRESS = re.compile(r"0x[0-9a-f]{4,}")


def note_failures(num_updates: Callable[[], int]) -> None:
    """From now on, an exception that ends this process is noted in the file that `FAILURE_FILE_VARIABLE` names, if any.

    Only the first rank of the job that raises writes it. A rank that raises because of a different rank does not, and
    waits a moment before it exits, since srun then ends the rank that has the cause. `num_updates`: returns the
    number of updates made so far. Not collective.
    """
    path = os.environ.get(FAILURE_FILE_VARIABLE)
    if not path:
        return
    theirs, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid and (is_victim(error) or isinstance(error, RemoteRankError)):
            _await_note(path)
        elif os.getpid() == pid and not isinstance(error, KeyboardInterrupt):
            _write_once(path, render_failure(num_updates(), error))
        theirs(kind, error, trace)

    sys.excepthook = hook


def render_failure(num_updates: int, error: BaseException) -> str:
    """One line that is the same if the same error comes at the same update again."""
    message = " ".join(_ADDRESS.sub("0x...", str(error)).split())[:_MAX_CHARACTERS]
    return f"after {num_updates} updates: {type(error).__name__}{f': {message}' if message else ''}\n"


def _await_note(path: str) -> None:
    end_s = time.monotonic() + _VICTIM_WAIT_S
    while not os.path.exists(path) and time.monotonic() < end_s:
        time.sleep(0.05)


def _write_once(path: str, text: str) -> None:
    """Create the file with `text`, if there is none and the folder can be written to."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:  # another rank was first, or the disk is full, which must not hide the error itself
        if not isinstance(error, FileExistsError):
            print(f"ddpilot: the failure could not be noted in {path}: {error}", file=sys.stderr)  # noqa: T201
