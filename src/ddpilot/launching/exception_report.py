# SPDX-License-Identifier: Apache-2.0
"""Report an exception of a rank: the one way for `launch`, for the kernels of a session, and for ``ddpilot run``.

The traceback of a report starts at the user's first frame, and has no frames of guard's wrappers around torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from types import FrameType, TracebackType

from ddpilot.errors import DdpilotError, chain, user_tracebacks
from ddpilot.launching.rank_reports import Raised
from ddpilot.module_names import GUARD_FOLDER

_MAX_HEADLINE_LINES = 3
_GUARD_FRAME = re.compile(
    rf'^([ \t]*)File "[^"\n]*{GUARD_FOLDER}[^"\n]*", line \d+, in .*\n(?:\1[ \t].*\n)*', re.MULTILINE
)

_UNSENT = "the outcome of `{}` cannot be sent ("


def render_unsent(rank: int, function_name: str, reason: str) -> str:
    """Line for stderr: neither value nor error of a rank can be sent to the parent; `find_unsent` finds it there."""
    return (
        f"ddpilot: rank {rank}: {_UNSENT.format(function_name)}{reason}): the program closed descriptors that are not "
        "its own, as `os.closerange` does when a process becomes a daemon. Close only what you opened\n"
    )


def find_unsent(lines: Sequence[str], function_name: str) -> bool:
    """True if a line of `render_unsent` is in `lines`."""
    return any(line.startswith("ddpilot: rank ") and _UNSENT.format(function_name) in line for line in lines)


def message_of(error: BaseException) -> str:
    """`str(error)`, or the placeholder of Python's own tracebacks if that raises."""
    try:
        return str(error)
    except Exception as failure:  # `__str__` is user code; the error itself has to be reported, not this failure
        return f"<exception str() failed: {type(failure).__name__}>"


def leave_out_guard(text: str) -> str:
    """Remove the frames of guard's wrappers from tracebacks that a different process formatted as text."""
    return _GUARD_FRAME.sub("", text)


def shorten_message(message: str) -> str:
    """Shorten a message for a headline: more than 3 non-empty lines become the first and the last one."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return message if len(lines) <= _MAX_HEADLINE_LINES else f"{lines[0]} ... {lines[-1]}"


def exitcode_of(error: BaseException) -> int:
    """Exit code, 0 to 255: a `SystemExit`'s own code (0 for a bare `sys.exit()`), 1 for any other exception."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)


_VICTIM_TEXT = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|broken pipe|socket (is )?closed|got 0 bytes"
    r"|gloo.*(pair\.cc|connectFullMesh)|timed out waiting \d+ ?ms for (recv|send) operation"
    r"|application timeout caused pair closure|ncclRemoteError|remote process exited|communicator was aborted"
    r"|(client|server) socket has (failed|timed out)|DistNetworkError|recvValue failed|sendBytes failed"
    r"|process group was freed",
    re.IGNORECASE | re.DOTALL,
)
_VICTIM_TYPES = ("RemoteRankError", "RendezvousError", "DistNetworkError", "DistStoreError")


def is_victim(error: BaseException) -> bool:
    """True if `error`, or an exception it was raised from, looks like a lost connection or a failed peer rank."""
    return any(
        type(link).__name__ in _VICTIM_TYPES
        or (isinstance(link, (RuntimeError, OSError)) and _VICTIM_TEXT.search(message_of(link)))
        for link in chain(error)
    )


def reads_like_victim(type_name: str, message: str) -> bool:
    """Same as `is_victim`, for an error of which only the type name and the message are known."""
    return type_name in _VICTIM_TYPES or bool(_VICTIM_TEXT.search(message))


_FORMING = ("init_process_group", "new_group")
_MAX_CONNECTIONS = 20


def show_connections(error: BaseException) -> None:
    """Write this process's TCP connections to stderr if `error` was raised while torch formed a process group."""
    if not any(frame.f_code.co_name in _FORMING for frame, _ in traceback.walk_tb(error.__traceback__)):
        return
    import psutil

    with contextlib.suppress(psutil.Error, OSError, ValueError):  # only adds to the error, which is reported anyway
        found = psutil.Process().net_connections(kind="tcp")
        rows = [_render(each.laddr, each.raddr, each.status) for each in found[:_MAX_CONNECTIONS]]
        more = f" and {len(found) - len(rows)} more" if len(found) > len(rows) else ""
        sys.stderr.write(f"ddpilot: TCP connections of this rank: {'; '.join(rows) or 'none'}{more}\n")


def _render(near: Sequence[object], far: Sequence[object], status: str) -> str:
    """Format both ends as host:port, and the state; a listening socket has no remote end."""
    ends = [f"{end[0]}:{end[1]}" for end in (near, far) if end]
    return f"{' to '.join(ends)} {status}"


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
