# SPDX-License-Identifier: Apache-2.0
"""Show output and process exits that arrive while no cell is running."""

from __future__ import annotations

import time

from ddpilot.launching.rank_server.job import STORE
from ddpilot.output.view import RankMessage, View
from ddpilot.session.deaths import BEGIN_ANEW, describe_death
from ddpilot.session.hosts import RankHost
from ddpilot.session.kernels.events import Ended, Event, Said, Wrote
from ddpilot.session.kernels.states import Standing

_SHOWN = frozenset(
    {"stream", "display_data", "update_display_data", "clear_output", "comm_open", "comm_msg", "comm_close"}
)


class OutsideCells:
    """Shows in `view` what the ranks of `host` print and how they end between cells.

    `respawns`: the session's option.
    """

    def __init__(self, view: View, host: RankHost, standing: Standing, *, respawns: bool) -> None:
        self._view = view
        self._host = host
        self._standing = standing
        self._respawns = respawns
        self.is_ending = False
        """True once the ranks were asked to end: their exits are then not reported."""

    def show(self, event: Event) -> None:
        """Show the event if it has anything to display."""
        now = time.monotonic()
        if isinstance(event, Wrote):
            self._view.raw(event.rank, event.stream, event.data, now)
        elif isinstance(event, Ended) and not self.is_ending:
            self._show_end(event)
        elif isinstance(event, Said) and event.channel == "iopub" and event.kind in _SHOWN:
            message = RankMessage(event.rank, event.kind, event.content, event.metadata, event.buffers)
            self._view.message(message, now)

    def _show_end(self, ended: Ended) -> None:
        if ended.rank == STORE:
            self._view.note(f"{self._standing.store_end}; {BEGIN_ANEW}")
        elif ended.rank not in self._standing.dead:
            return  # an earlier process of a rank that was restarted since
        elif self._host.can_start:
            self._view.note(describe_death(ended.rank, self._standing.dead[ended.rank], self._respawns))
        elif not self._standing.live:  # reported once, for the last of them: the cause is the same
            self._view.note(f"the rank server has died, and all ranks and their variables with it; {BEGIN_ANEW}")
