# SPDX-License-Identifier: Apache-2.0
"""Report an exception of a rank: the one way for `launch`, for the kernels of a session, and for ``ddpilot run``.

The traceback of a report starts at the user's first frame, and has no frames of guard's wrappers around torch.
"""

from __future__ import annotations

import os
import time
import traceback
from types import FrameType, TracebackType

from ddpilot.errors import DdpilotError, user_tracebacks
from ddpilot.launching.exceptions import chain, exitcode_of, is_victim, leave_out_guard, message_of
from ddpilot.launching.rank_reports import Raised
from ddpilot.module_names import GUARD_FOLDER

_MAX_TEXT_CHARS = 100_000
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CALLER_FOLDERS = tuple(os.path.join(_PACKAGE, name, "") for name in ("launching", "session", "trainer"))
_CALLER_PACKAGES = ("IPython", "ipykernel", "runpy")


def report_exception(error: BaseException, text: str | None = None) -> Raised:
    """The report of `error`, time-stamped now. `text`: its traceback; None: `user_traceback(error)`."""
    text = user_traceback(error) if text is None else text
    return Raised(
        time_s=time.monotonic(),
        type_name=type(error).__qualname__,
        message=leave_out_guard(message_of(error))[:_MAX_TEXT_CHARS],
        traceback=leave_out_guard(text)[-_MAX_TEXT_CHARS:],
        is_victim=is_victim(error),
        interrupted=isinstance(error, KeyboardInterrupt),
        exitcode=exitcode_of(error),
    )


def user_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, starting at the user's first frame; "" if the call itself failed.

    An exception of ddpilot, whose message is complete, has the user's own lines only.
    """
    if isinstance(error, DdpilotError):
        with user_tracebacks(error):
            return "".join(traceback.format_exception(error)) if error.__traceback__ is not None else ""
    prune_guard(error)
    frames = skip_callers(error.__traceback__)
    if frames is None and (error.__traceback__ is None or error.__traceback__.tb_next is None):
        return ""  # wrong arguments, or a C function
    return "".join(traceback.TracebackException(type(error), error, frames).format())


def skip_callers(frames: TracebackType | None) -> TracebackType | None:
    """Skip the leading frames, which call the user's function, script or cell. None if there are no other frames."""
    while frames is not None and _is_caller(frames.tb_frame):
        frames = frames.tb_next
    return frames


def _is_caller(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in _CALLER_PACKAGES or frame.f_code.co_filename.startswith(_CALLER_FOLDERS)


def prune_guard(error: BaseException) -> None:
    """Remove the frames of guard's wrappers from the tracebacks of `error` and of the exceptions it was raised from."""
    for link in chain(error):
        link.__traceback__ = frames = _skip_guard(link.__traceback__)
        while frames is not None:
            frames.tb_next = _skip_guard(frames.tb_next)
            frames = frames.tb_next


def _skip_guard(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and GUARD_FOLDER in frames.tb_frame.f_code.co_filename:
        frames = frames.tb_next
    return frames
