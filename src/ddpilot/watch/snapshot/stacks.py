# SPDX-License-Identifier: Apache-2.0
"""Find the user's own lines in a stack, a traceback, or the recorded line of a collective."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ddpilot.module_names import RECORDED_KERNELS
from ddpilot.record.flight_ring.log import CallSite, Collective
from ddpilot.source.parsed_file import Chain
from ddpilot.user_files import CodeLine, is_users, is_users_line
from ddpilot.watch.snapshot.model import PythonStack, RankSnapshot

SUBPROCESS = "/subprocess.py:"
"""In the stack of a rank that waits for a child process or reads its output."""


_TRACE = re.compile(
    r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)(?:\n    (?P<text>\S.*))?', re.MULTILINE
)
_CELL = re.compile(r"^\s*(?:File )?(?P<file>Cell In\[\d+\]),? line (?P<line>\d+)", re.MULTILINE)

# User code that itself waits for an asynchronous operation.
_WAITS = re.compile(r"\.(wait|wait_stream|synchronize|result|value|item|cpu|numpy|tolist)\(|\bfloat\(")
_BLOCKING_FILES = (
    *("/torch/distributed/", "/torch/autograd/graph.py", "/torch/nn/parallel/distributed.py"),
    *("/torch/_tensor.py", "/torch/_tensor_str.py", "/torch/amp/grad_scaler.py"),  # read numbers from a device
    RECORDED_KERNELS,  # calls the operators: a first send or recv waits there for its peer
)


def user_chain(frames: Iterable[CodeLine]) -> Chain:
    """Return the user's calls among `frames`, which are innermost first."""
    chain: list[CodeLine] = []
    called = ""
    for frame in frames:
        if is_users_line(frame.file, frame.function, called):
            chain.append(frame)
        called = frame.file
    return tuple(reversed(chain))


def innermost(stack: PythonStack | None) -> CodeLine | None:
    """Return the user's innermost line of the main thread; None if there is none."""
    chain = user_chain(stack.frames) if stack is not None else ()
    return chain[-1] if chain else None


def chain_of(rank: RankSnapshot, entry: Collective | None) -> Chain:
    """Return the user's calls that lead to `entry`; if None, to where the rank is now or where its error was raised.

    If the stack is not in `entry`, only the innermost calls are known, which were recorded with it.
    """
    stack = rank.stack
    is_current = stack is not None and (entry is None or stack.taken_ns >= entry.start_ns)
    from_stack = user_chain(stack.frames) if stack is not None and is_current else ()
    for chain in (from_stack, _from_traceback(rank)):
        if chain and entry is None:
            return chain
        if chain and entry is not None and (cut := _cut_at(chain, entry.line)):
            return cut
    return chain_of_line(entry.line) if entry is not None else ()


def _from_traceback(rank: RankSnapshot) -> Chain:
    text = rank.error.traceback if rank.error is not None else ""
    found = (_TRACE.finditer(text), _CELL.finditer(text))
    frames = [_frame(match) for matches in found for match in matches]
    return user_chain(reversed(frames))


def _frame(match: re.Match[str]) -> CodeLine:
    parts = match.groupdict()
    return CodeLine(parts["file"], int(parts["line"]), parts.get("function") or "", parts.get("text") or "")


def _cut_at(chain: Chain, line: CallSite | None) -> Chain:
    """Return `chain` up to `line`; empty if it does not pass through `line`."""
    if line is None:
        return ()
    for number in range(len(chain) - 1, -1, -1):
        if chain[number].position == line.position:
            return (*chain[:number], replace(chain[number], text=chain[number].text or line.text))
    return ()


def chain_of_line(line: CallSite | None) -> Chain:
    """Return the user's calls that were recorded with a collective's line."""
    if line is None or not line.file:
        return ()
    return (*(caller for caller in reversed(line.callers) if is_users(caller.file)), line)


def is_waiting(stack: PythonStack | None, entry: Collective) -> bool | None:
    """Return True if the main thread waits in torch or for an asynchronous operation; None without a current stack."""
    if stack is None or stack.taken_ns < entry.start_ns or not stack.frames:
        return None
    frame = stack.frames[0]
    if frame.function == "synchronize" or any(part in frame.file for part in _BLOCKING_FILES):
        return True
    return bool(_WAITS.search(frame.text)) and is_users(frame.file)


def passes(stack: PythonStack | None, *parts: str) -> CodeLine | None:
    """Return the innermost main-thread frame whose ``file:function`` contains one of `parts`; None if none does."""
    for frame in stack.frames if stack is not None else ():
        if any(part in f"{frame.file}:{frame.function}" for part in parts):
            return frame
    return None
