# SPDX-License-Identifier: Apache-2.0
"""Encode values as bounded text for the observers of other nodes; what several values share is written once."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from ddpilot.errors import DdpilotError
from ddpilot.findings.finding import Finding
from ddpilot.record.flight_ring.log import CallSite, Collective, DdpPart, GroupOfRanks, RankLog, Tensor
from ddpilot.record.journal import Entry
from ddpilot.user_files import CodeLine
from ddpilot.watch.snapshot.model import ProcessState, PythonStack, RankException, RankSnapshot

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
