# SPDX-License-Identifier: Apache-2.0
"""Encode the state of one node's ranks as bounded text for the observers of other nodes.

A digest excludes guard's notes, the stacks of threads other than the main thread, and all but the newest records. The
reader converts its times to its own clock.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, astuple, dataclass, fields, replace
from typing import Any

from ddpilot.record.flight_ring.log import CallSite, Collective, DdpPart, GroupOfRanks, RankLog, Tensor
from ddpilot.user_files import CodeLine
from ddpilot.watch.snapshot.model import JobSnapshot, ProcessState, PythonStack, RankException, RankSnapshot

_ALL_CHARS = 2 * 1024 * 1024


_FEWEST_CHARS = 4 * 1024


MAX_CHARS = 64 * 1024
_NUM_ENTRIES = 256
_NUM_OF_GROUP = 4
"""Records kept of a group that was not used lately: enough to show how far each of its ranks has progressed."""
_NUM_FRAMES = 40
_MAX_ERROR_CHARS = 4000

_SHARED: Mapping[str, type] = {"group": GroupOfRanks, "line": CallSite, "ddp": DdpPart}
"""Fields of a record whose values are written once and then referred to by index."""
_TENSORS = ("inputs", "outputs")
_DEFAULTS: Mapping[type, Sequence[tuple[str, Any]]] = {
    kind: tuple((field.name, field.default) for field in fields(kind))
    for kind in (RankLog, Collective, GroupOfRanks, CallSite, DdpPart, Tensor, ProcessState, PythonStack)
}
_TIMES_OF_LOG, _TIMES_OF_ENTRY = (
    tuple(field.name for field in fields(kind) if field.name.endswith("_ns") and field.name != "started_unix_ns")
    for kind in (RankLog, Collective)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The state of the ranks of one node."""

    now_ns: int
    """When the state was gathered, on CLOCK_MONOTONIC of the machine that holds the digest."""
    unix_ns: int
    """The same moment on the writer's system clock (Unix time)."""
    is_asking: bool
    """True if the writer requests digests of the other nodes."""
    ranks: Mapping[int, RankSnapshot]

    @property
    def is_final(self) -> bool:
        """True if all of its ranks have ended, so that no newer digest will follow."""
        return all(rank.process.state == "ended" or rank.returned for rank in self.ranks.values())


def encode_digest(digest: Digest, max_chars: int = MAX_CHARS) -> str:
    """Encode the digest as at most `max_chars` characters, dropping old records and then ranks until it fits."""
    num_entries, ranks = _NUM_ENTRIES, dict(digest.ranks)
    while True:
        text = _encode(replace(digest, ranks=ranks), num_entries)
        if len(text) <= max_chars or not ranks:
            return text
        if num_entries > 1:
            num_entries //= 2
        else:
            ranks = dict(list(ranks.items())[: len(ranks) // 2])


def decode_digest(text: str) -> Digest:
    """Decode what `encode_digest` wrote, on the writer's clock. Raises `ValueError` for any other text."""
    try:
        raw = unpack(text)
        shared = [_read_shared(kind, value) for kind, value in raw["shared"]]
        ranks = {each["rank"]: _read_rank(each, shared) for each in raw["ranks"]}
        return Digest(now_ns=raw["now_ns"], unix_ns=raw["unix_ns"], is_asking=raw["is_asking"], ranks=ranks)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"not a digest of a node: {type(error).__name__}: {error}") from error


def move_clock(digest: Digest, *, unix_minus_monotonic_ns: int, after_ns: int, before_ns: int) -> Digest:
    """Convert the times of the digest to CLOCK_MONOTONIC of this machine.

    `unix_minus_monotonic_ns`: this machine's Unix time minus its CLOCK_MONOTONIC. The digest was written between
    `after_ns` and `before_ns`, which bounds the error if the system clocks disagree.
    """
    written_ns = min(max(digest.unix_ns - unix_minus_monotonic_ns, after_ns), before_ns)
    by_ns = written_ns - digest.now_ns
    ranks = {number: _move_rank(rank, by_ns) for number, rank in digest.ranks.items()}
    return replace(digest, now_ns=written_ns, ranks=ranks)


def merge(job: JobSnapshot, digests: Iterable[Digest]) -> JobSnapshot:
    """Add the ranks of `digests`, which are on the clock of `job`; ranks that `job` already has are kept."""
    ranks = dict(job.ranks)
    for digest in digests:
        age_ns = max(0, job.now_ns - digest.now_ns)
        for number, rank in digest.ranks.items():
            if number not in job.ranks:
                ranks[number] = replace(rank, log=_keep_beating(rank.log, age_ns))
    return replace(job, ranks=dict(sorted(ranks.items())))


def _keep_beating(log: RankLog | None, age_ns: int) -> RankLog | None:
    # Only the silence up to the moment of gathering counts.
    if log is None or log.heartbeat_ns is None:
        return log
    return replace(log, heartbeat_ns=log.heartbeat_ns + age_ns)


def _encode(digest: Digest, num_entries: int) -> str:
    shared = _Shared()
    raw = {
        "now_ns": digest.now_ns,
        "unix_ns": digest.unix_ns,
        "is_asking": digest.is_asking,
        "ranks": [_write_rank(rank, shared, num_entries) for rank in digest.ranks.values()],
        "shared": shared.values,
    }
    return pack(raw)


def to_json(value: Any) -> str:
    """Return `value` as compact JSON; a dataclass such as `CodeLine` becomes a list."""
    return json.dumps(value, separators=(",", ":"), check_circular=False, default=astuple)


def pack(value: Any) -> str:
    """Return `value` as compressed JSON in base64, for a text that travels through a store."""
    return base64.b64encode(zlib.compress(to_json(value).encode())).decode()


def unpack(text: str) -> Any:
    """Return what `pack` was given. Raises `ValueError` for any other text."""
    try:
        return json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except zlib.error as error:
        raise ValueError(f"zlib: {error}") from error


class _Shared:
    """Table of values that several records share, each written once."""

    def __init__(self) -> None:
        self.values: list[tuple[str, Any]] = []
        self._numbers: dict[Any, int] = {}

    def number_of(self, kind: str, value: Any) -> int:
        key = (kind, value)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            written = [_bare(tensor) for tensor in value] if kind == "tensors" else _bare(value)
            self.values.append((kind, written))
        return self._numbers[key]


def _read_shared(kind: str, value: Any) -> Any:
    if kind == "tensors":
        return tuple(Tensor(**_with_tuples(each)) for each in value)
    callers = {"callers": tuple(CodeLine(*each) for each in value["callers"])} if "callers" in value else {}
    return _SHARED[kind](**{**_with_tuples(value), **callers})


def _write_rank(rank: RankSnapshot, shared: _Shared, num_entries: int) -> dict[str, Any]:
    raw: dict[str, Any] = {"rank": rank.rank, "process": _bare(rank.process), "returned": rank.returned}
    if rank.log is not None:
        chosen = _choose(rank.log.collectives, num_entries)
        raw["log"] = _bare(replace(rank.log, collectives=())) | {
            "collectives": [_write_entry(entry, shared) for entry in chosen]
        }
    if rank.stack is not None:
        raw["stack"] = _bare(replace(rank.stack, frames=rank.stack.frames[:_NUM_FRAMES]))
    if rank.error is not None:
        error = rank.error
        texts = {"message": error.message[:_MAX_ERROR_CHARS], "traceback": error.traceback[-_MAX_ERROR_CHARS:]}
        raw["error"] = {"type_name": error.type_name, **texts}
    return raw


def _read_rank(raw: Mapping[str, Any], shared: list[Any]) -> RankSnapshot:
    log = stack = None
    if "log" in raw:
        entries = tuple(_read_entry(each, shared) for each in raw["log"]["collectives"])
        log = RankLog(**{**raw["log"], "collectives": entries})
    if "stack" in raw:
        frames = tuple(CodeLine(*frame) for frame in raw["stack"].get("frames", ()))
        stack = PythonStack(**{**raw["stack"], "frames": frames})
    error = RankException(**raw["error"]) if "error" in raw else None
    process = ProcessState(**raw["process"])
    return RankSnapshot(rank=raw["rank"], log=log, process=process, stack=stack, error=error, returned=raw["returned"])


def _choose(entries: tuple[Collective, ...], num_newest: int) -> list[Collective]:
    """Return the newest `num_newest` entries, and before them the last few of each group."""
    chosen = list(entries[-num_newest:])
    counts: dict[object, int] = {}
    older = []
    for entry in reversed(entries):
        key = entry.group.local_key if entry.group is not None else None
        counts[key] = counts.get(key, 0) + 1
        if entry.index < chosen[0].index and counts[key] <= min(_NUM_OF_GROUP, num_newest):
            older.append(entry)
    return [*reversed(older), *chosen]


def _write_entry(entry: Collective, shared: _Shared) -> dict[str, Any]:
    raw = _bare(entry)
    for name in _SHARED:
        if raw.get(name) is not None:
            raw[name] = shared.number_of(name, raw[name])
    for name in _TENSORS:
        if name in raw:
            raw[name] = shared.number_of("tensors", raw[name])
    return raw


def _read_entry(raw: Mapping[str, Any], shared: list[Any]) -> Collective:
    numbers = {name: shared[raw[name]] for name in (*_SHARED, *_TENSORS) if raw.get(name) is not None}
    return Collective(**{**_with_tuples(raw), **numbers})


def _bare(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    found = {}
    for name, default in _DEFAULTS[type(value)]:
        here = getattr(value, name)
        if default is MISSING or here != default:
            found[name] = here
    return found


def _with_tuples(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _as_tuple(value) for name, value in raw.items()}


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _move_rank(rank: RankSnapshot, by_ns: int) -> RankSnapshot:
    log, stack = rank.log, rank.stack
    if log is not None:
        entries = tuple(_move(entry, _TIMES_OF_ENTRY, by_ns) for entry in log.collectives)
        log = replace(_move(log, _TIMES_OF_LOG, by_ns), collectives=entries)
    if stack is not None:
        stack = _move(stack, ("taken_ns",), by_ns)
    return replace(rank, log=log, stack=stack, process=_move(rank.process, ("ended_ns",), by_ns))


def _move(value: Any, names: Iterable[str], by_ns: int) -> Any:
    times = {name: getattr(value, name) for name in names}
    return replace(value, **{name: time_ns + by_ns for name, time_ns in times.items() if time_ns is not None})


def max_chars(num_others: int) -> int:
    """Return the maximum length of one text of a node that all others, or node 0, have to read."""
    return min(MAX_CHARS, max(_FEWEST_CHARS, _ALL_CHARS // (1 + num_others)))
