# SPDX-License-Identifier: Apache-2.0
"""Encode the state of one node's ranks as bounded text for the observers of other nodes.

A digest excludes guard's notes, the stacks of threads other than the main thread, and all but the newest records. The
reader converts its times to its own clock.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, TypeVar

from ddpilot.errors import DdpilotError
from ddpilot.findings.finding import Finding
from ddpilot.record.flight_ring.log import CallSite, Collective, DdpPart, GroupOfRanks, RankLog, Tensor
from ddpilot.record.journal import Entry
from ddpilot.user_files import CodeLine
from ddpilot.watch.snapshot.model import JobSnapshot, ProcessState, PythonStack, RankException, RankSnapshot

MAX_CHARS = 64 * 1024
_ALL_CHARS, _FEWEST_CHARS = 2 * 1024 * 1024, 4 * 1024
_MIN_SHARED_CHARS = 64
"""Shorter texts are not worth a reference to the shared table."""

_OF_SEVERAL = (CallSite, DdpPart, GroupOfRanks)
"""Kinds of values that several collectives share."""
_KINDS: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        *(CodeLine, Collective, Entry, Finding, ProcessState, PythonStack, RankException, RankLog, RankSnapshot),
        *(Tensor, *_OF_SEVERAL),
    )
}
_DEFAULTS = {kind: [(field.name, field.default) for field in fields(kind)] for kind in _KINDS.values()}
_KIND, _SHARED, _DICT, _LIST = "", "@", "{", "["
_T = TypeVar("_T")


def max_chars(num_others: int) -> int:
    """Return the maximum length of one text of a node that all others, or node 0, have to read."""
    return min(MAX_CHARS, max(_FEWEST_CHARS, _ALL_CHARS // (1 + num_others)))


def encode(**values: Any) -> str:
    """Return `values` as text: JSON values, tuples, and dataclasses of the kinds above, in each other."""
    encoder = _Encoder()
    raw = {name: encoder.encode(value) for name, value in values.items()}
    text = json.dumps([raw, encoder.shared], separators=(",", ":"), check_circular=False)
    return base64.b64encode(zlib.compress(text.encode())).decode()


def decode(text: str, make: Callable[..., _T]) -> _T:
    """Call `make` with the values that `encode` was given. Raises `ValueError` if that is not possible."""
    try:
        raw, shared = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
        found: list[Any] = []
        for each in shared:  # refers to earlier ones only
            found.append(_decode(each, found))
        return make(**{name: _decode(value, found) for name, value in raw.items()})
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, DdpilotError, zlib.error) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


class _Encoder:
    def __init__(self) -> None:
        self.shared: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in _DEFAULTS:
            return self._refer(value, self._encode_fields) if kind in _OF_SEVERAL else self._encode_fields(value)
        if kind is tuple:
            is_of_tensors = bool(value) and type(value[0]) is Tensor
            return self._refer(value, self._encode_items) if is_of_tensors else self._encode_items(value)
        if kind is dict:
            return {_DICT: {name: self.encode(each) for name, each in value.items()}}
        if kind is list:
            text = json.dumps(value, separators=(",", ":"), check_circular=False)
            is_short = len(text) < _MIN_SHARED_CHARS
            return {_LIST: value} if is_short else self._refer((_LIST, text), lambda _: {_LIST: value})
        is_long = kind is str and len(value) >= _MIN_SHARED_CHARS
        return self._refer(value, lambda text: text) if is_long else value

    def _refer(self, key: Any, write: Callable[[Any], Any]) -> dict[str, int]:
        if key not in self._numbers:
            written = write(key)
            self._numbers[key] = len(self.shared)
            self.shared.append(written)
        return {_SHARED: self._numbers[key]}

    def _encode_items(self, values: tuple[Any, ...]) -> list[Any]:
        return [self.encode(each) for each in values]

    def _encode_fields(self, value: Any) -> dict[str, Any]:
        """Return the fields of a dataclass that differ from their defaults."""
        found = {_KIND: type(value).__name__}
        for name, default in _DEFAULTS[type(value)]:
            here = getattr(value, name)
            if default is MISSING or here != default:
                found[name] = self.encode(here)
        return found


def _decode(raw: Any, shared: list[Any]) -> Any:
    if isinstance(raw, list):
        return tuple([_decode(each, shared) for each in raw])
    if not isinstance(raw, dict):
        return raw
    if _SHARED in raw:
        return shared[raw[_SHARED]]
    if _LIST in raw:
        return raw[_LIST]
    if _DICT in raw:
        return {name: _decode(each, shared) for name, each in raw[_DICT].items()}
    values = {name: _decode(each, shared) for name, each in raw.items() if name != _KIND}
    return _KINDS[raw[_KIND]](**values)


_NUM_ENTRIES = 256
_NUM_OF_GROUP = 4
"""Records kept of a group that was not used lately: enough to show how far each of its ranks has progressed."""
_NUM_FRAMES = 40
_MAX_ERROR_CHARS = 4000

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
    num_entries, ranks = _NUM_ENTRIES, tuple(digest.ranks.values())
    while True:
        kept = tuple(_cut(rank, num_entries) for rank in ranks)
        text = encode(now_ns=digest.now_ns, unix_ns=digest.unix_ns, is_asking=digest.is_asking, ranks=kept)
        if len(text) <= max_chars or not ranks:
            return text
        if num_entries > 1:
            num_entries //= 2
        else:
            ranks = ranks[: len(ranks) // 2]


def decode_digest(text: str) -> Digest:
    """Decode what `encode_digest` wrote, on the writer's clock. Raises `ValueError` for any other text."""

    def make(*, ranks: tuple[RankSnapshot, ...], **header: Any) -> Digest:
        return Digest(ranks={each.rank: each for each in ranks}, **header)

    try:
        return decode(text, make)
    except ValueError as error:
        raise ValueError(f"not a digest of a node: {error}") from error


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


def _cut(rank: RankSnapshot, num_entries: int) -> RankSnapshot:
    """Return `rank` without guard's notes, with the newest `num_entries` records, and with shortened texts."""
    log, stack, error = rank.log, rank.stack, rank.error
    if log is not None:
        log = replace(log, collectives=tuple(_choose(log.collectives, num_entries)))
    if stack is not None:
        stack = replace(stack, frames=stack.frames[:_NUM_FRAMES])
    if error is not None:
        message, traceback = error.message[:_MAX_ERROR_CHARS], error.traceback[-_MAX_ERROR_CHARS:]
        error = replace(error, message=message, traceback=traceback)
    return replace(rank, log=log, stack=stack, error=error, journal=())


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
