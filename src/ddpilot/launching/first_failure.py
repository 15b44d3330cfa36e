# SPDX-License-Identifier: Apache-2.0
"""Determine which rank failed first, and where, and build the error that reports it."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ddpilot.errors import RankError, is_known
from ddpilot.findings.catalog import SHIP_ERROR, find_cause, find_known, fix_in_rank, is_of_child
from ddpilot.findings.text import render_ranks
from ddpilot.launching.exception_report import find_unsent, shorten_message
from ddpilot.launching.rank_environment import EXIT_REQUEUE
from ddpilot.launching.rank_reports import Exited, Raised
from ddpilot.user_files import CodeLine, is_users_line, name_cells, starts_ranks

_WATCHDOG = re.compile(r"watchdog thread terminated with exception: (?P<why>.+)")
"""Log line of an accelerator's backend (NCCL) with the reason for which it ends the process."""
_NAMED = re.compile(r"\[rank (\d+)\] ")

SETTLE_S = 0.05
"""Seconds to wait after the first cause for a cause that happened earlier but is reported later."""

VICTIM_GRACE_S = 0.3
"""Seconds to wait after a victim's failure for its cause."""

ENDING_LIMIT_S = 3.0
"""Maximum wait in seconds while a rank that has not reported is exiting: it is the cause and will be reported."""


@dataclass(kw_only=True)
class RankEnd:
    """How a rank ended, as far as is known. A failure has raised, or has exited with a nonzero code or by a signal.

    `error`: the original exception if it could be unpickled; `since_s`: when the failure was received.
    """

    rank: int
    pid: int | None = None
    raised: Raised | None = None
    exited: Exited | None = None
    error: BaseException | None = None
    since_s: float = 0.0

    @property
    def time_s(self) -> float:
        """When the failure happened, in seconds of the machine's monotonic clock."""
        if self.raised is not None:
            return self.raised.time_s
        assert self.exited is not None
        return self.exited.time_s

    @property
    def named_rank(self) -> int | None:
        """The rank that a ddpilot exception names as failed; None for other exceptions or if it names no rank."""
        if self.raised is None or not is_known(self.raised.type_name):
            return None
        named = _NAMED.match(self.raised.message)
        return None if named is None else int(named[1])

    @property
    def is_victim(self) -> bool:
        """True if the failure looks like a consequence of a different rank's failure."""
        return self.raised is not None and self.raised.is_victim

    @property
    def has_returned(self) -> bool:
        """True if the rank's program finished without an error."""
        return self.exited is not None and self.exited.exitcode == 0

    def describe_end(self) -> str:
        """How the rank ended, as the predicate of a sentence whose subject is the rank."""
        if self.raised is not None:
            if self.raised.type_name == "SystemExit":
                return f"called sys.exit with code {self.raised.exitcode}"
            return "ended at KeyboardInterrupt" if self.raised.interrupted else f"raised {self.raised.type_name}"
        if self.exited is not None:
            return self.exited.describe()
        return "was never started" if self.pid is None else "is still running"


_End = TypeVar("_End", bound=RankEnd)


def choose_failure(
    failures: Sequence[_End], now_s: float, silent_pids: Callable[[], Iterable[int]] = tuple
) -> _End | None:
    """Return the earliest cause, or the earliest victim if no cause was reported; None while more may arrive.

    If several ranks report a failure that happened on one of them, that rank's own failure is returned. `silent_pids`
    returns the process ids of ranks that have neither reported nor, as far as is known, exited.
    """
    if not failures:
        return None
    waited_s = now_s - min(failure.since_s for failure in failures)
    causes = [failure for failure in failures if not failure.is_victim]
    if causes and waited_s >= SETTLE_S:
        first = min(causes, key=lambda failure: failure.time_s)
        if first.named_rank in (None, first.rank):
            return first
        named = next((failure for failure in causes if failure.rank == first.named_rank), None)
        if named is not None or waited_s >= VICTIM_GRACE_S:
            return named or first
        return None
    if waited_s >= ENDING_LIMIT_S or (waited_s >= VICTIM_GRACE_S and not any(map(is_ending, silent_pids()))):
        return min(failures, key=lambda failure: failure.time_s)
    return None


def may_be_followed(ranks: Sequence[RankEnd], waited_s: float, limit_s: float) -> bool:
    """True while live ranks may still exit with the requeue code, as one of `ranks` did `waited_s` ago.

    They may for `limit_s` seconds, in which they may still run a `finally` block or exit handlers.
    """
    codes = {end.exitcode for rank in ranks for end in (rank.raised, rank.exited) if end is not None}
    is_requeue = codes <= {EXIT_REQUEUE} and not any(rank.has_returned for rank in ranks)
    return is_requeue and waited_s <= limit_s and any(rank.exited is None for rank in ranks)


def build_error(
    failure: RankEnd,
    *,
    function_name: str,
    num_ranks: int,
    last_lines: tuple[str, ...],
    victims: Sequence[int],
    returned: Sequence[int],
    is_script: bool = False,
) -> RankError:
    """The error to raise in the parent, with its cause chained. `is_script`: `function_name` is a script's name."""
    raised, exited = failure.raised, failure.exited
    found = f"rank {failure.rank} "
    fix = ""
    exitcode = raised.exitcode if raised is not None else exited.exitcode if exited is not None else 1
    is_requeue = exitcode == EXIT_REQUEUE
    if is_requeue:
        found += f"exited with code {EXIT_REQUEUE} (EX_TEMPFAIL), which asks for a restart"
        fix = "Run the same again: a Loop exits so after saving, and resumes from there"
    elif raised is not None and raised.type_name == "SystemExit":
        found += f"called sys.exit with code {raised.exitcode}"
    elif raised is not None and raised.type_name == "ShipError":
        found += name_cells(raised.message)
    elif raised is not None:
        message = name_cells(shorten_message(raised.message) if raised.traceback else raised.message)
        found += f"raised {raised.type_name}: {message}" if message else f"raised {raised.type_name}"
    else:
        assert exited is not None
        how, fix = describe_exit(exited, function_name, last_lines)
        if is_script and exited.signal_name is None:
            how, fix = f"exited with code {exited.exitcode}", ""
        found += how
    error = RankError(
        f"running `{function_name}` on {num_ranks} rank{'s' * (num_ranks > 1)}",
        found=found,
        fix=fix
        or _describe_ranks_before(failure, returned, "ended" if is_script else "returned")
        or _describe_known(raised, last_lines),
        rank=failure.rank,
        host=platform.node(),
        exitcode=exitcode,
        signal_name=None if exited is None or raised is not None else exited.signal_name,
        rank_traceback="" if raised is None or is_requeue else name_cells(raised.traceback),
        last_lines=tuple(map(name_cells, tidy_lines(last_lines))),
        others=_describe_victims(victims),
    )
    error.__cause__ = failure.error
    return error


def describe_exit(exited: Exited, function_name: str, last_lines: Sequence[str]) -> tuple[str, str]:
    """How a process ended, as the predicate of a sentence whose subject is the rank; and the fix, "" if unknown."""
    crash_line = find_crash_line(last_lines)
    where = "" if crash_line is None else f" at {name_cells(crash_line)}"
    peak = f"its peak was {exited.peak_memory_bytes / 1e9:.1f} GB"
    if exited.signal_name == "SIGKILL":
        return f"was killed by SIGKILL; the kernel's OOM killer is the usual cause; {peak}", ""
    if exited.signal_name == "SIGABRT":
        cause = "C++ code called abort; the usual cause over gloo is tensors that differ in size or dtype between ranks"
        if watchdog := next(filter(None, map(_WATCHDOG.search, last_lines)), None):
            where, cause = "", f"the watchdog of its device's collectives ended it: {watchdog['why'].strip()}"
        return f"was aborted (SIGABRT){where}: {cause}; {peak}", "Its last output has the C++ message"
    if exited.signal_name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"):
        return f"crashed with {exited.signal_name}{where}; {peak}", ""
    if exited.signal_name is not None:
        return f"was killed by {exited.signal_name}; {peak}", ""
    if find_unsent(last_lines, function_name):
        how = f"closed the descriptor on which the outcome of `{function_name}` is sent, as `os.closerange` does"
        return how, "Close only what you opened: descriptors of ddpilot and torch are open too"
    how = f"exited with code {exited.exitcode} before `{function_name}` returned"
    fix = "Look for `os._exit` or a C library that calls `exit`; return from the function instead"
    return how, fix if exited.exitcode else f"{fix}, or call `sys.exit(0)`: its value is then None"


def _describe_known(raised: Raised | None, last_lines: Sequence[str]) -> str:
    """The fix for a known message of torch or Python; "" for a ShipError, which contains its own fix."""
    if raised is not None and raised.type_name == SHIP_ERROR:
        return ""
    known = find_cause(f"{raised.type_name}: {raised.message}" if raised is not None else "", last_lines)
    if not known:
        return ""
    entry = known[0]
    return f"{fix_in_rank(entry)} ({entry.code} {entry.name}: `ddpilot explain {entry.code}`)"


def find_child_errors(raised: Raised, last_lines: Sequence[str]) -> tuple[str, ...]:
    """For a rank that raised because its child process ended: up to 5 output lines with the child's errors.

    Empty if the exception is not about a child process.
    """
    text = f"{raised.type_name}: {raised.message}"
    if not is_of_child(text):
        return ()
    own = find_known(text)
    found = (
        line for line in last_lines if any(each.severity == "error" and each not in own for each in find_known(line))
    )
    return tuple(dict.fromkeys(found))[-5:]


def _describe_ranks_before(failure: RankEnd, returned: Sequence[int], ended: str) -> str:
    """Return a sentence about the ranks that had ended before `failure` lost its connection, or ""."""
    if not (failure.is_victim and returned):
        return ""
    found = f"{render_ranks(returned).capitalize()} had already {ended} and could not take part"
    return f"{found}: do all ranks run the same steps, with the same shapes?"


def _describe_victims(victims: Sequence[int]) -> str:
    if not victims:
        return ""
    return f"{render_ranks(victims).capitalize()} failed because of it (a connection to a rank went away)."


_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?: in (?P<function>.+))?$')
_RAISED_FRAME = re.compile(
    r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)(?:\n    (?P<text>\S.*))?$', re.M
)
_MAX_SHOWN = 20


def tidy_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """The last 20 of `lines`, without the launcher's frames and the list of extension modules."""
    kept, called = [], ""
    for line in lines:
        frame = _FRAME.match(line)
        is_own = frame is not None and _is_own(frame["file"], called)
        called = frame["file"] if frame is not None else ""
        if not (is_own or line.startswith("Extension modules: ")):
            kept.append(line)
    while kept and not kept[-1].strip():
        kept.pop()
    return tuple(kept[-_MAX_SHOWN:])


def find_crash_line(lines: Iterable[str]) -> str | None:
    """Location of the crashed thread, as ``file:line in function``; None if `lines` contains no stack.

    Prefers the innermost frame outside installed libraries and ddpilot; falls back to the innermost frame.
    """
    in_stack = False
    innermost = None
    called = ""
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None and in_stack and not _is_own(frame["file"], called):
            place = f"{frame['file']}:{frame['line']} in {frame['function']}"
            if is_users_line(frame["file"], frame["function"] or "", called):
                return place
            innermost = innermost or place
        called = frame["file"] if frame is not None else ""
        in_stack = in_stack or "(most recent call first)" in line
    return innermost


def find_raised_line(traceback: str) -> CodeLine | None:
    """The innermost frame outside installed libraries and ddpilot; in a chain of exceptions, that of the last one."""
    found = None
    for frame in _RAISED_FRAME.finditer(traceback):
        if is_users_line(frame["file"], frame["function"]):
            found = frame
    if found is None:
        return None
    return CodeLine(found["file"], int(found["line"]), found["function"], (found["text"] or "").strip())


def _is_own(file: str, called: str) -> bool:
    return starts_ranks(file) or (file == "<string>" and starts_ranks(called))


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
