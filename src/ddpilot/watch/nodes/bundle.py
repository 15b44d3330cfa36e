# SPDX-License-Identifier: Apache-2.0
"""Encode what guard noted on one node, and the findings, as text for the other nodes."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpilot.errors import DdpilotError
from ddpilot.findings.finding import Finding
from ddpilot.record.journal import Entry

_MIN_SHARED_CHARS = 64
"""Shorter values are not worth a reference to the shared table."""

_SHARED = "@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What is new on one node since its previous bundle."""

    now_ns: int
    """The bundle is complete up to this time, on the CLOCK_MONOTONIC of the node that wrote it."""
    entries: Sequence[tuple[int, Entry]] = ()
    """(rank, entry) pairs; the entries of one rank are in order."""
    findings: Sequence[Finding] = ()
    is_last: bool = False
    """True if the ranks of that node have ended."""


def encode_bundle(bundle: Bundle) -> str:
    """Encode the bundle as text. Values that several entries share, as those of ranks that agree, are written once."""
    shared: dict[str, int] = {}
    entries = []
    for rank, entry in bundle.entries:
        values = {key: _share(value, shared) for key, value in entry.values.items()}
        entries.append((rank, entry.index, entry.time_ns, entry.kind, values))
    said = {
        "now_ns": bundle.now_ns,
        "entries": entries,
        "findings": [finding.to_dict() for finding in bundle.findings],
        "is_last": bundle.is_last,
        "shared": list(shared),
    }
    return base64.b64encode(zlib.compress(_to_json(said).encode())).decode()


def decode_bundle(text: str) -> Bundle:
    """Decode what `encode_bundle` wrote. Raises `ValueError` for any other text."""
    try:
        said = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
        shared = [json.loads(each) for each in said["shared"]]
        entries = [
            (rank, Entry(index, time_ns, kind, {key: _find(each, shared) for key, each in values.items()}))
            for rank, index, time_ns, kind, values in said["entries"]
        ]
        findings = [Finding.from_dict(each) for each in said["findings"]]
        return Bundle(now_ns=said["now_ns"], entries=entries, findings=findings, is_last=said["is_last"])
    except (ValueError, zlib.error, KeyError, TypeError, IndexError, AttributeError, DdpilotError) as error:
        raise ValueError(f"no bundle of a node: {type(error).__name__}: {error}") from error


def _share(value: Any, shared: dict[str, int]) -> Any:
    if not isinstance(value, dict | list | str):
        return value
    text = _to_json(value)
    if len(text) < _MIN_SHARED_CHARS:
        return value
    return {_SHARED: shared.setdefault(text, len(shared))}


def _find(value: Any, shared: Sequence[Any]) -> Any:
    return shared[value[_SHARED]] if isinstance(value, dict) and _SHARED in value else value


def _to_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), check_circular=False)
