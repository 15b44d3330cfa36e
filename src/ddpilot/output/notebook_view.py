# SPDX-License-Identifier: Apache-2.0
"""`NotebookView`: shows labelled lines of ranks, and rich displays once for all ranks where they look the same.

`WidgetStates` reads the state of ranks' widgets from their messages, to find widgets that look the same. `CommBridge`
connects them to the front end, by comms of the notebook's kernel with the same ids.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comm
from IPython.core.error import StdinNotImplementedError

from ddpilot.output.equal_displays import Publisher, SharedDisplay, SharedDisplays
from ddpilot.output.rich_output import WIDGET, RankMessage, RichOutput, read_rich
from ddpilot.output.view import SendToRank, View
from ddpilot.output.writer import Output, TextScreen

_MAX_REMEMBERED = 10_000
"""Maximum number of lines and displays of a cell that can be shown again after `clear_output` on some of its ranks."""


@dataclass
class _ShownLine:
    ranks: set[int]
    stream: str
    text: str


class NotebookScreen(TextScreen):
    """Shows lines on the notebook's stdout and stderr, and rich displays in `displays`."""

    def __init__(self, mode: Output, limit_bytes: int | None, displays: SharedDisplays, publisher: Publisher) -> None:
        super().__init__(mode, limit_bytes)
        self._displays = displays
        self._publisher = publisher
        self._shown: deque[_ShownLine | SharedDisplay] = deque(maxlen=_MAX_REMEMBERED)
        self._to_clear: set[int] = set()
        displays.begin()
        displays.is_labelled = mode == "labelled"

    def hides_rich(self, rank: int) -> bool:
        """True if the output mode excludes this rank. Rich output does not count for the limit."""
        return self._mode == "silent" or (self._mode == "rank_zero" and rank != 0)

    def line(self, ranks: Sequence[int], stream: str, text: str) -> None:
        self._clear_now(ranks)
        self._shown.append(_ShownLine(set(ranks), stream, text))
        super().line(ranks, stream, text)

    def rich(self, items: Mapping[int, RichOutput]) -> None:
        """Show a display below the label of its ranks, or add the ranks to the label of an equal one."""
        self._clear_now(items)
        place = self._displays.show(items)
        if place is not None:
            self._shown.append(place)

    def update(self, items: Mapping[int, RichOutput]) -> None:
        self._displays.update(items)

    def clear(self, ranks: Sequence[int], wait: bool) -> None:
        """Remove what these ranks have shown in this cell, and keep the output of the other ranks."""
        self._to_clear.update(ranks)
        if not wait:
            self._clear_now(ranks, wait=False)

    def close(self) -> None:
        """Give ranks whose display has changed to something else a display of their own."""
        self._shown.extend(self._displays.settle())
        super().close()

    def _clear_now(self, ranks: Sequence[int] | Mapping[int, RichOutput], wait: bool = True) -> None:
        if not self._to_clear.intersection(ranks):
            return
        gone, self._to_clear = self._to_clear, set()
        kept = [entry for entry in self._shown if _leave(entry, gone)]
        self._shown = deque(kept, maxlen=_MAX_REMEMBERED)
        self._publisher.clear_output(wait or bool(kept))
        for entry in kept:
            if isinstance(entry, SharedDisplay):
                self._displays.reshow(entry)
            else:
                super().line(sorted(entry.ranks), entry.stream, entry.text)


def _leave(entry: _ShownLine | SharedDisplay, gone: set[int]) -> bool:
    """Remove ranks from something that is shown. Return True if any rank is left."""
    if isinstance(entry, SharedDisplay):
        for rank in gone & set(entry.members):
            del entry.members[rank]
        return bool(entry.members)
    entry.ranks -= gone
    return bool(entry.ranks)


class NotebookView(View):
    """Shows output in the notebook of `shell`. `mode`, `limit_bytes`: a session's `output` and `output_limit_bytes`."""

    def __init__(self, shell: Any, mode: Output = "labelled", limit_bytes: int | None = None) -> None:
        super().__init__(mode, limit_bytes)
        self._shell = shell
        self._widgets = WidgetStates()
        self._bridge: CommBridge | None = None
        self._displays = SharedDisplays(self._publisher, self._pair)

    def make_screen(self) -> TextScreen:
        return NotebookScreen(self._mode, self._limit_bytes, self._displays, self._publisher())

    def bind(self, send: SendToRank) -> None:
        self._bridge = CommBridge(send)

    def read(self, message: RankMessage) -> RichOutput:
        """Return the display in a message. A widget is identified by its state."""
        view = message.content.get("data", {}).get(WIDGET, {})
        return read_rich(message, self._widgets.looks(view.get("model_id", "")) if view else None)

    def take_comm(self, message: RankMessage) -> None:
        self._widgets.take(message)
        if self._bridge is not None:
            self._bridge.take(message)

    def write_error(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def ask(self, rank: int, prompt: str, password: bool) -> str:
        """Ask in the notebook. Raises EOFError if it runs without a front end."""
        try:
            return super().ask(rank, prompt, password)
        except StdinNotImplementedError as error:
            raise EOFError(str(error)) from error

    def _publisher(self) -> Publisher:
        publisher: Publisher = self._shell.display_pub
        return publisher

    def _pair(self, shown: str, alike: dict[int, str]) -> None:
        for rank, widget in alike.items():
            for mine, theirs in self._widgets.twins(shown, widget):
                if self._bridge is not None:
                    self._bridge.pair(mine, rank, theirs)


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


class CommBridge:
    """Forwards messages between the ranks' comms and the front end. `send` sends a message to a rank."""

    def __init__(self, send: SendToRank) -> None:
        self._send = send
        self._comms: dict[str, comm.base_comm.BaseComm] = {}
        self._alike: dict[str, list[tuple[int, str]]] = {}

    def take(self, message: RankMessage) -> None:
        """Forward a rank's "comm_open", "comm_msg" or "comm_close" to the front end."""
        comm_id, data = message.content["comm_id"], message.content.get("data", {})
        if message.kind == "comm_open":
            opened = comm.create_comm(
                target_name=message.content["target_name"],
                target_module=message.content.get("target_module"),
                comm_id=comm_id,
                data=data,
                metadata=message.metadata,
                buffers=message.buffers,
            )
            opened.on_msg(functools.partial(self._answer, message.rank, "comm_msg"))
            opened.on_close(functools.partial(self._answer, message.rank, "comm_close"))
            self._comms[comm_id] = opened
        elif message.kind == "comm_msg" and comm_id in self._comms:
            self._comms[comm_id].send(data, message.metadata, message.buffers)
        elif message.kind == "comm_close" and comm_id in self._comms:
            self._comms.pop(comm_id).close(data, message.metadata, message.buffers)
            self._alike.pop(comm_id, None)

    def pair(self, shown: str, rank: int, alike: str) -> None:
        """Also send the user's actions on the widget `shown` to the widget `alike` of `rank`."""
        pairs = self._alike.setdefault(shown, [])
        if (rank, alike) not in pairs:
            pairs.append((rank, alike))

    def _answer(self, rank: int, kind: str, message: dict[str, Any]) -> None:
        content, metadata = message["content"], message.get("metadata") or {}
        buffers = [bytes(buffer) for buffer in message.get("buffers") or ()]
        data, comm_id = content.get("data", {}), content["comm_id"]
        self._send(rank, kind, {"comm_id": comm_id, "data": data}, metadata, buffers)
        if data.get("method") != "request_state":
            for other, alike in self._alike.get(comm_id, ()):
                self._send(other, kind, {"comm_id": alike, "data": data}, metadata, buffers)
