# SPDX-License-Identifier: Apache-2.0
"""Describe what a live rank does while other ranks wait for it. None of this is proof: the rank may still arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddpilot.module_names import FORM_GROUP
from ddpilot.user_files import CodeLine
from ddpilot.watch.explain.text import render_duration, render_place
from ddpilot.watch.snapshot.model import PythonStack, RankSnapshot
from ddpilot.watch.snapshot.stacks import SUBPROCESS, innermost, passes

Moves = Literal["moves", "stands", "unknown"]

_NO_PYTHON_NS = 1_000_000_000
"""If a rank has run no Python for longer than this and nothing else is known, native code holds the GIL."""

_COMPILES = (  # functions, since a module may merely be in the middle of its import
    *("/convert_frame.py:_compile", "/compile_fx.py:compile_fx", "/async_compile.py:wait"),
    "/triton/compiler/compiler.py:compile",
)
_MAKES_GROUP = (
    *(":init_process_group", ":_store_based_barrier", ":_new_process_group_helper", ":new_group", "/rendezvous.py:"),
    FORM_GROUP,
)
_READS_OR_WRITES = (
    *("/torch/serialization.py:", "/torch/distributed/checkpoint/", "/safetensors/", "/pickle.py:", "/zipfile.py:"),
    *("/urllib/", "/urllib3/", "/requests/", "/http/client.py", "/ssl.py:", "/shutil.py:", "/gzip.py:", "/fsspec/"),
    *("/huggingface_hub/", "/numpy/lib/npyio.py:", "/pathlib.py:read", "/tarfile.py:"),
)
NOT_CALLED = "has not called it"
_WAITS_FOR_CHILD = "waits for a child process"
_DOES_IO = "is reading or writing a checkpoint, a file or the network"
_KINDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("DDP213", "waits for a DataLoader worker", (":_try_get_data", ":_get_data")),
    ("DDP216", "is leaving its group (destroy_process_group)", (":destroy_process_group",)),
    ("DDP215", "waits for all ranks to create a group", _MAKES_GROUP),
    ("DDP221", "compiles (torch.compile)", _COMPILES),
    ("DDP214", _WAITS_FOR_CHILD, (SUBPROCESS,)),
    ("DDP214", _DOES_IO, _READS_OR_WRITES),
)
_IO_CALLS = ("open(", "torch.save(", "torch.load(", ".read(", ".write(", "np.load(", "np.save(", "pickle.", "urlopen(")
_WHY = {
    "DDP213": "a DataLoader worker is stuck or slow: a lock that was held at the fork, a file system that does not "
    "respond, or a sample that takes long",
    "DDP214": "one rank reads or writes while the other ranks wait in a collective",
    "DDP215": "all ranks create a group together, and some have not called it",
    "DDP216": "one rank leaves its group while other ranks still call collectives",
    "DDP217": "its Python code is running, so it may still call the collective",
    "DDP218": "it is alive and calls no collective; it is not known whether it will",
    "DDP221": "this rank compiles what the other ranks have in their caches",
}
_FIX = {
    "DDP213": "check what the dataset does there; try `num_workers=0`, `multiprocessing_context='forkserver'` and "
    "DataLoader's `timeout=`",
    "DDP214": "nothing, if it is expected to take long; otherwise do not let other ranks wait for it, or raise the "
    "group's `timeout`",
    "DDP215": "call init_process_group and new_group on all ranks, members of the new group or not, in the same order",
    "DDP216": "call a barrier on all ranks before destroy_process_group",
    "DDP217": "check what takes long there; balance the work, or move it to where no rank waits",
    "DDP218": "check the line where it is: if it does not finish, make the rank call what the other ranks are in",
    "DDP221": "compile before the ranks diverge: warm up with one batch on all ranks, then a barrier; share the cache "
    "directory (TORCHINDUCTOR_CACHE_DIR)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The activity of a rank while others wait for it in a collective."""

    code: str
    words: str
    """The activity as a clause without its subject."""
    at: CodeLine | None
    moves: Moves

    @property
    def why(self) -> str:
        """Why the wait happens."""
        return _WHY[self.code]

    @property
    def fix(self) -> str:
        """The fix."""
        return _FIX[self.code]


def describe_activity(rank: RankSnapshot, earlier: RankSnapshot | None, now_ns: int) -> Activity:
    """Describe where `rank` is now and whether it has moved since `earlier`."""
    at = innermost(rank.stack)
    moves = has_moved(rank, earlier)
    code, words = _kind(rank, at)
    if words == _WAITS_FOR_CHILD and rank.stack is not None and rank.stack.child:
        words += f": {rank.stack.child}"
    if moves == "moves" and code == "DDP218":
        code, words = "DDP217", "is running: its Python line changes"
    if rank.process.os_state in ("T", "t"):
        words = "is stopped (SIGSTOP, Ctrl-Z or a debugger)"
    elif rank.has_closed_log:
        words = "has reached the end of its program; its process has not exited yet"
    elif code == "DDP218" and (silent_ns := _without_python_ns(rank, now_ns)) > _NO_PYTHON_NS:
        words = f"has run no Python code for {render_duration(silent_ns)}: native code holds the GIL"
    return Activity(code=code, words=words, at=at, moves=moves)


def _kind(rank: RankSnapshot, at: CodeLine | None) -> tuple[str, str]:
    for code, words, parts in _KINDS:
        if passes(rank.stack, *parts) is not None:
            return code, words
    if at is not None and rank.stack is not None and any(call in at.text for call in _IO_CALLS):
        return "DDP214", _DOES_IO
    return "DDP218", NOT_CALLED


def has_moved(rank: RankSnapshot, earlier: RankSnapshot | None) -> Moves:
    """Return "moves" if the rank's stack changed or it began collectives since `earlier`.

    "unknown" if there are not two stacks to compare.
    """
    if earlier is None:
        return "unknown"
    if rank.log is not None and earlier.log is not None and rank.log.num_begun > earlier.log.num_begun:
        return "moves"
    if rank.stack is None or earlier.stack is None or rank.stack.taken_ns <= earlier.stack.taken_ns:
        return "unknown"
    is_running = rank.stack.is_running and earlier.stack.is_running
    return "moves" if is_running or _lines(rank.stack) != _lines(earlier.stack) else "stands"


def _lines(stack: PythonStack) -> list[tuple[str, int]]:
    return [frame.position for frame in stack.frames]


def _without_python_ns(rank: RankSnapshot, now_ns: int) -> int:
    if rank.log is None or rank.process.state != "running":
        return 0
    return now_ns - (rank.log.heartbeat_ns or rank.log.started_ns)


def render_where(activity: Activity) -> str:
    """Format the rank's line and whether it moves; empty if the line is unknown."""
    standing = {"stands": " (has not moved)", "moves": " (moves)", "unknown": ""}[activity.moves]
    return f"{render_place(activity.at)}{standing}" if activity.at is not None else ""
