# SPDX-License-Identifier: Apache-2.0
"""Logs of ranks made by hand, and jobs made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddpilot.record.flight_ring.log import CallSite, Collective, DdpPart, GroupOfRanks, RankLog, Tensor
from ddpilot.user_files import CodeLine
from ddpilot.watch.snapshot.model import JobSnapshot, ProcessState, PythonStack, RankSnapshot

S = 10**9
"""A second, in the nanoseconds of these logs; everything begins at 100 s."""
FILE = "train.py"
FLOATS = (Tensor(dtype="float32", shape=(4,), device="cpu"),)


def group_of(*ranks: int, name: str = "0", incarnation: int = 1) -> GroupOfRanks:
    """A group; ``0`` is the default one."""
    return GroupOfRanks(name=name, incarnation=incarnation, ranks=ranks, size=len(ranks))


def bucket(index: int = 0) -> DdpPart:
    """A gradient bucket of two."""
    names = ("net.0.weight", "net.4.bias")
    return DdpPart(what="bucket", model="Net", index=index, num_buckets=2, names=names, num_parameters=2)


def part(what: Any) -> DdpPart:
    """Something else that DDP does."""
    return DdpPart(what=what, model="Net")


class Writer:
    """Writes the log of one rank, a collective every 10 ms."""

    def __init__(self, rank: int, group: GroupOfRanks, *, file: str = FILE, texts: Mapping[int, str] | None = None):
        self.rank, self._group, self._file, self._texts = rank, group, file, texts or {}
        self._entries: list[Collective] = []
        self._seqs: dict[tuple[str, int], int] = {}

    def call(self, op: str, line: int, **more: Any) -> Writer:
        """It has called `op` from `line`, and that is over. `led`: lines and functions of the calls that led there."""
        group = more.pop("group", self._group)
        seq = self._seqs.get((group.name, group.incarnation), 0)
        is_p2p = op in ("send", "recv")
        if not is_p2p:
            self._seqs[group.name, group.incarnation] = seq + 1
        index = len(self._entries) + 1
        known: dict[str, Any] = {
            "inputs": () if op == "barrier" else FLOATS,
            "line": more.pop("at", None) or self._line(line, more),
            "start_ns": 100 * S + index * S // 100,
            "state": "done",
            "is_async": more.get("ddp") is not None,
            "thread": 1,
            "num_bytes": 0 if op == "barrier" else 16,
            "reduce_op": "SUM" if op == "all_reduce" else None,
        }
        known |= more
        seq_of = None if is_p2p else seq
        self._entries.append(Collective(index=index, op=op, operator=f"c10d::{op}", group=group, seq=seq_of, **known))
        return self

    def wait(self, op: str, line: int, **more: Any) -> Writer:
        """It is in `op` now."""
        return self.call(op, line, **{"state": "begun", **more})

    def log(self, **more: Any) -> RankLog:
        """What its ring holds."""
        about: dict[str, Any] = {"pid": 4000 + self.rank, "host": "node", "torch": ""}
        times: dict[str, Any] = {"started_ns": 99 * S, "started_unix_ns": 0, "heartbeat_ns": 10**18, "closed_ns": None}
        counts: dict[str, Any] = {"num_begun": len(self._entries), "num_torn": 0, "num_faults": 0, "first_fault": ""}
        known = {"collectives": tuple(self._entries), **about, **times, **counts}
        return RankLog(rank=self.rank, **{**known, **more})

    def _text(self, line: int) -> str:
        return self._texts.get(line, "")

    def _line(self, line: int, more: dict[str, Any]) -> CallSite:
        callers = tuple(CodeLine(self._file, at, function, self._text(at)) for at, function in more.pop("led", ()))
        function, via = more.pop("function", "<module>"), more.pop("via", "")
        return CallSite(file=self._file, line=line, text=self._text(line), function=function, via=via, callers=callers)


def alive(writer: Writer, *stack: CodeLine, **more: Any) -> RankSnapshot:
    """The rank runs; `stack`: of its main thread, innermost first, taken last of all."""
    process = ProcessState(pid=4000 + writer.rank, state="running")
    taken = PythonStack(taken_ns=109 * S, frames=stack) if stack else None
    return RankSnapshot(rank=writer.rank, **{"log": writer.log(), "process": process, "stack": taken, **more})


def returned(writer: Writer) -> RankSnapshot:
    """It has come to its end."""
    process = ProcessState(pid=4000 + writer.rank, state="ended", exitcode=0)
    return RankSnapshot(rank=writer.rank, log=writer.log(closed_ns=105 * S), process=process, returned=True)


def died(writer: Writer, signal_name: str = "SIGKILL", exitcode: int = -9, ended_ns: int = 105 * S) -> RankSnapshot:
    """A signal ended it."""
    process = ProcessState(
        pid=4000 + writer.rank, state="ended", exitcode=exitcode, signal_name=signal_name, ended_ns=ended_ns
    )
    return RankSnapshot(rank=writer.rank, log=writer.log(), process=process)


def job(ranks: Iterable[RankSnapshot], *, after_s: float = 10.0, **more: Any) -> JobSnapshot:
    """All of them, so many seconds after everything began."""
    views = {view.rank: view for view in ranks}
    return JobSnapshot(world_size=len(views), ranks=views, now_ns=100 * S + int(after_s * S), **more)


def texts_of(source: str) -> dict[int, str]:
    """The lines of a program, by number, without indentation."""
    return {number: line.strip() for number, line in enumerate(source.splitlines(), 1)}
