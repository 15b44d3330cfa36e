# SPDX-License-Identifier: Apache-2.0
"""`%ddp status`: show the status board once, or keep it up to date."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from typing import Any

from ddpilot.magics.parser import MagicParser
from ddpilot.magics.shell_session import Desk
from ddpilot.output.shared_displays import Publisher
from ddpilot.session.board.as_html import render_board_html
from ddpilot.session.session import Session
from ddpilot.session.status_board import render_board_text

_INTERVAL_S = 1.0
_ENDED = "the ranks were stopped"


def show_status(desk: Desk, given: dict[str, Any]) -> None:
    """Show the board; with `live`, start updating it; with `stop`, stop updating it."""
    if given.get("stop"):
        was_live = desk.keep(None)
        desk.say("the board is not kept up to date any more" if was_live else "no board is kept up to date")
        return
    session = desk.need("reading the ranks' status")
    if desk.is_terminal:
        if given.get("live"):
            _follow(session)
        else:
            desk.write(f"{_render(session)['text/plain']}\n")
    elif given.get("live"):
        desk.keep(LiveBoard(session, desk.shell.display_pub))
    else:
        desk.shell.display_pub.publish(_render(session))


def add_status(parser: MagicParser) -> None:
    """Add the options of `%ddp status`."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--live", action="store_true", help="keep the board up to date until the ranks are stopped")
    how.add_argument("--stop", action="store_true", help="keep it up to date no longer")


class LiveBoard:
    """A display that is updated in place every second by its own thread, also while a cell runs."""

    def __init__(self, session: Session, publisher: Publisher) -> None:
        self._session = session
        self._publisher = publisher
        self._display = {"display_id": f"ddpilot-board-{uuid.uuid4().hex[:12]}"}
        self._end = threading.Event()
        publisher.publish(_render(session), transient=self._display)
        self._thread = threading.Thread(target=self._run, name="ddpilot-board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop updating and leave the display as it is, except that it reports if the ranks were stopped."""
        self._end.set()
        self._thread.join()
        if not self._session.is_running:
            self._update()

    def _run(self) -> None:
        while self._session.is_running and not self._end.wait(_INTERVAL_S):
            self._update()

    def _update(self) -> None:
        self._publisher.publish(_render(self._session), transient=self._display, update=True)


def _render(session: Session) -> dict[str, Any]:
    if not session.is_running:
        return {"text/plain": _ENDED, "text/html": f"<div>{_ENDED}</div>"}
    statuses, now_s = session.status(), time.monotonic()
    return {"text/plain": render_board_text(statuses, now_s), "text/html": render_board_html(statuses, now_s)}


def _follow(session: Session) -> None:
    """Redraw the board in place until Ctrl-C: a terminal cannot show it next to the prompt."""
    num_lines = 0
    try:
        while session.is_running:
            text = _render(session)["text/plain"]
            up = f"\x1b[{num_lines}F\x1b[J" if num_lines else ""
            sys.stdout.write(f"{up}{text}\n")
            sys.stdout.flush()
            num_lines = text.count("\n") + 1
            time.sleep(_INTERVAL_S)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
