# SPDX-License-Identifier: Apache-2.0
"""`WidgetStates`: state of the ranks' widgets, read from their messages, to find widgets that look the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from ddpilot.output.view import RankMessage

_REFERENCE = "IPY_MODEL_"


class WidgetStates:
    """The state of every widget model of every rank, by comm id."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, Any]] = {}

    def take(self, message: RankMessage) -> None:
        """Update the states from a "comm_open", "comm_msg" or "comm_close" message; ignore comms of other objects."""
        comm_id, data = message.content.get("comm_id", ""), message.content.get("data", {})
        if message.kind == "comm_close":
            self._states.pop(comm_id, None)
        elif isinstance(data, dict) and isinstance(data.get("state"), dict):
            if message.kind == "comm_open":
                self._states[comm_id] = {}
            elif data.get("method") not in ("update", "echo_update"):
                return
            if comm_id in self._states:
                self._states[comm_id].update(data["state"])
                self._states[comm_id].update(_digests(data.get("buffer_paths", ()), message.buffers))

    def looks(self, comm_id: str) -> object:
        """Return the state of the widget, including nested widgets but without ids; None if the widget is unknown."""
        return self._looks(comm_id, ()) if comm_id in self._states else None

    def _looks(self, comm_id: str, above: tuple[str, ...]) -> object:
        if comm_id in above or comm_id not in self._states:
            return f"widget {above.index(comm_id) if comm_id in above else 'closed'}"
        return self._resolve(self._states[comm_id], (*above, comm_id))

    def _resolve(self, value: Any, above: tuple[str, ...]) -> object:
        if isinstance(value, dict):
            return {key: self._resolve(each, above) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._resolve(each, above) for each in value]
        if isinstance(value, str) and value.startswith(_REFERENCE):
            return self._looks(value.removeprefix(_REFERENCE), above)
        return value

    def twins(self, one: str, other: str) -> Iterator[tuple[str, str]]:
        """Yield pairs of model ids at the same position in two widgets that look the same."""
        pending, seen = [(one, other)], set[str]()
        while pending:
            left, right = pending.pop()
            if left in seen or left not in self._states or right not in self._states:
                continue
            seen.add(left)
            yield left, right
            references = (_references(self._states[left]), _references(self._states[right]))
            pending += zip(*references, strict=False)


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [found for key in sorted(value) for found in _references(value[key])]
    if isinstance(value, (list, tuple)):
        return [found for each in value for found in _references(each)]
    is_reference = isinstance(value, str) and value.startswith(_REFERENCE)
    return [value.removeprefix(_REFERENCE)] if is_reference else []


def _digests(paths: Any, buffers: list[bytes]) -> dict[str, str]:
    """Return digests of the binary values of a state, such as an image's data, by their path."""
    return {
        "/".join(map(str, path)): hashlib.blake2b(buffer, digest_size=16).hexdigest()
        for path, buffer in zip(paths, buffers, strict=False)
    }
