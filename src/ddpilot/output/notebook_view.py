# SPDX-License-Identifier: Apache-2.0
"""`NotebookView`: shows labelled lines of ranks, and rich displays once for all ranks where they look the same."""

from __future__ import annotations

import getpass
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.error import StdinNotImplementedError

from ddpilot.launching.options import Output
from ddpilot.output.comm_bridge import CommBridge
from ddpilot.output.rich_output import WIDGET, Rich, read_rich
from ddpilot.output.screen import Screen, TextScreen
from ddpilot.output.screen_view import ScreenView
from ddpilot.output.shared_displays import Place, Places, Publisher
from ddpilot.output.view import RankMessage, SendToRank
from ddpilot.output.widget_states import WidgetStates

_MAX_REMEMBERED = 10_000
"""Maximum number of lines and displays of a cell that can be shown again after `clear_output` on some of its ranks."""


@dataclass
class _ShownLine:
    ranks: set[int]
    stream: str
    text: str


class NotebookScreen(TextScreen):
    """Shows lines on the notebook's stdout and stderr, and rich displays in `places`."""

    def __init__(self, mode: Output, limit_bytes: int | None, places: Places, publisher: Publisher) -> None:
        super().__init__(mode, limit_bytes)
        self._places = places
        self._publisher = publisher
        self._rank_mode: Output = mode
        self._shown: deque[_ShownLine | Place] = deque(maxlen=_MAX_REMEMBERED)
        self._to_clear: set[int] = set()
        places.begin()
        places.is_labelled = mode == "labelled"

    def hides_rich(self, rank: int) -> bool:
        """True if the output mode excludes this rank. Rich displays do not count for the limit."""
        return self._rank_mode == "silent" or (self._rank_mode == "rank_zero" and rank != 0)

    def line(self, ranks: Sequence[int], stream: str, text: str) -> None:
        """Show a line."""
        self._clear_now(ranks)
        self._shown.append(_ShownLine(set(ranks), stream, text))
        super().line(ranks, stream, text)

    def rich(self, items: Mapping[int, Rich]) -> None:
        """Show a display below the label of its ranks, or add the ranks to the label of an equal one."""
        self._clear_now(items)
        place = self._places.show(items)
        if place is not None:
            self._shown.append(place)

    def update(self, items: Mapping[int, Rich]) -> None:
        """Replace the content of the display."""
        self._places.update(items)

    def clear(self, ranks: Sequence[int], wait: bool) -> None:
        """Remove what these ranks have shown in this cell, and keep the output of the other ranks."""
        self._to_clear.update(ranks)
        if not wait:
            self._clear_now(ranks, wait=False)

    def close(self) -> None:
        """Give ranks whose display has changed to something else a display of their own."""
        self._shown.extend(self._places.settle())
        super().close()

    def _clear_now(self, ranks: Sequence[int] | Mapping[int, Rich], wait: bool = True) -> None:
        if not self._to_clear.intersection(ranks):
            return
        gone, self._to_clear = self._to_clear, set()
        kept = [entry for entry in self._shown if _leave(entry, gone)]
        self._shown = deque(kept, maxlen=_MAX_REMEMBERED)
        self._publisher.clear_output(wait or bool(kept))
        for entry in kept:
            if isinstance(entry, Place):
                self._places.reshow(entry)
            else:
                super().line(sorted(entry.ranks), entry.stream, entry.text)


def _leave(entry: _ShownLine | Place, gone: set[int]) -> bool:
    """Remove ranks from something that is shown. Return True if any rank is left."""
    if isinstance(entry, Place):
        for rank in gone & set(entry.members):
            del entry.members[rank]
        return bool(entry.members)
    entry.ranks -= gone
    return bool(entry.ranks)


class NotebookView(ScreenView):
    """Shows output in the notebook of `shell`. `mode`, `limit_bytes`: a session's `output` and `output_limit_bytes`."""

    def __init__(self, shell: Any, mode: Output = "labelled", limit_bytes: int | None = None) -> None:
        super().__init__()
        self._shell = shell
        self._mode: Output = mode
        self._limit_bytes = limit_bytes
        self._widgets = WidgetStates()
        self._bridge: CommBridge | None = None
        self._places = Places(self._publisher, self._pair)

    def make_screen(self) -> Screen:
        """Return a screen on the notebook's current streams."""
        return NotebookScreen(self._mode, self._limit_bytes, self._places, self._publisher())

    def bind(self, send: SendToRank) -> None:
        """Set the function that sends messages to the ranks' widgets."""
        self._bridge = CommBridge(send)

    def read(self, message: RankMessage) -> Rich:
        """Return the display in a message. A widget is identified by its state."""
        view = message.content.get("data", {}).get(WIDGET, {})
        return read_rich(message, self._widgets.looks(view.get("model_id", "")) if view else None)

    def take_comm(self, message: RankMessage) -> None:
        """Forward a comm message of a rank's widget."""
        self._widgets.take(message)
        if self._bridge is not None:
            self._bridge.take(message)

    def write_error(self, text: str) -> None:
        """Write to the notebook's stderr, which shows colours."""
        sys.stderr.write(text)
        sys.stderr.flush()

    def ask(self, rank: int, prompt: str, password: bool) -> str:
        """Ask in the notebook, with the rank as a prefix. Raises EOFError if the front end does not support input."""
        self.flush()
        question = f"[rank {rank}] {prompt}"
        try:
            return getpass.getpass(question) if password else input(question)
        except StdinNotImplementedError as error:  # the notebook runs without a front end
            raise EOFError(str(error)) from error

    def _publisher(self) -> Publisher:
        publisher: Publisher = self._shell.display_pub
        return publisher

    def _pair(self, shown: str, alike: dict[int, str]) -> None:
        for rank, widget in alike.items():
            for mine, theirs in self._widgets.twins(shown, widget):
                if self._bridge is not None:
                    self._bridge.pair(mine, rank, theirs)
