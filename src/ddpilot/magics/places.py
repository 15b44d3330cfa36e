# SPDX-License-Identifier: Apache-2.0
"""Where in a notebook the rich objects of ranks are shown: one place for all ranks whose object looks the same."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddpilot.findings.words import render_ranks
from ddpilot.session.shown.rich import Rich

# Looks like, and stands exactly below, the label of a line.
_LABEL_STYLE = (
    "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,inherit);"
    "padding-left:calc(2px + var(--jp-code-padding,0px));margin-top:4px;opacity:.75"
)
_LABEL_HTML = f'<div style="{_LABEL_STYLE}">{{label}}</div>'


class Publisher(Protocol):
    """IPython's display publisher, which `%%capture` replaces for the time of a cell."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
    ) -> None:
        """Show something, or with `update` replace what has the same display id."""

    def clear_output(self, wait: bool = False) -> None:
        """Clear the cell's output."""


@dataclass
class Place:
    """One display in the notebook, below a label that is a display too, so that it can change."""

    display_id: str
    fingerprint: str
    """Of what was shown here first: a rank that is late shows the same."""

    members: dict[int, Rich] = field(default_factory=dict)
    """By rank, what it shows here now. The lowest rank's is on the screen."""

    @property
    def lead(self) -> int:
        """The rank whose object is on the screen."""
        return min(self.members)


class Places:
    """All places of one session. `publisher()`: the notebook's, now; `pair(shown, alike)` is told of widgets in one."""

    def __init__(self, publisher: Callable[[], Publisher], pair: Callable[[str, dict[int, str]], None]) -> None:
        self._publisher = publisher
        self._pair = pair
        self._prefix = f"ddpilot-{uuid.uuid4().hex[:12]}"
        self._count = 0
        self._recent: list[Place] = []  # of this cell, in order
        self._last: dict[int, int] = {}  # by rank: index of its last one in there
        self._by_id: dict[tuple[int, str], Place] = {}  # by rank and the display id that the rank knows
        self._changed: dict[str, Place] = {}
        self.is_labelled = True

    def begin(self) -> None:
        """A cell starts: what it shows joins nothing of the cells before."""
        self._recent.clear()
        self._last.clear()

    def show(self, items: Mapping[int, Rich]) -> Place | None:
        """Show objects that look the same; the new place, or None where they joined one that is there."""
        for rank, rich in items.items():
            if (rank, rich.display_id) in self._by_id:
                self.update({rank: rich})  # shown once more under the id: the earlier ones change too
        place = self._find(items)
        is_new = place is None
        if place is None:
            place = self._add(items)
            self.reshow(place)
        else:
            self._join(place, items)
        for rank, rich in items.items():
            if rich.display_id:
                self._by_id[rank, rich.display_id] = place
        widgets = {rank: rich.widget_id for rank, rich in place.members.items() if rich.widget_id}
        if len(widgets) > 1:
            self._pair(widgets.pop(place.lead), widgets)
        return place if is_new else None

    def update(self, items: Mapping[int, Rich]) -> None:
        """Show something else in the places of the same display ids. Others are passed over, as in Jupyter."""
        for rank, rich in items.items():
            place = self._by_id.get((rank, rich.display_id))
            if place is None or rank not in place.members:
                continue
            was_blank = place.members[place.lead].is_blank
            place.members[rank] = rich
            self._changed[place.display_id] = place
            if rank == place.lead:
                self._publish(place.display_id, rich.data, rich.metadata, update=True)
                if rich.is_blank != was_blank:
                    self._label(place, update=True)

    def settle(self) -> list[Place]:
        """At a cell's end: ranks whose object has become another than the one on the screen get a place of their own.

        While a cell runs they are only ahead or behind.
        """
        new = []
        for place in self._changed.values():
            shown = place.members[place.lead].fingerprint if place.members else ""
            apart: dict[str, dict[int, Rich]] = {}
            for rank, rich in place.members.items():
                if rich.fingerprint != shown:
                    apart.setdefault(rich.fingerprint, {})[rank] = rich
            for items in apart.values():
                for rank in items:
                    del place.members[rank]
                self._label(place, update=True)
                new.append(self._add(items))
                self.reshow(new[-1])
                self._by_id.update({(rank, rich.display_id): new[-1] for rank, rich in items.items()})
        self._changed.clear()
        return new

    def reshow(self, place: Place) -> None:
        """Show a place with its label."""
        self._label(place)
        rich = place.members[place.lead]
        self._publish(place.display_id, rich.data, rich.metadata)

    def _find(self, items: Mapping[int, Rich]) -> Place | None:
        after = max(self._last.get(rank, -1) for rank in items)
        fingerprint = next(iter(items.values())).fingerprint
        for place in self._recent[after + 1 :]:
            if place.fingerprint == fingerprint and place.members and not set(items) & set(place.members):
                return place
        return None

    def _add(self, items: Mapping[int, Rich]) -> Place:
        self._count += 1
        fingerprint = next(iter(items.values())).fingerprint
        place = Place(f"{self._prefix}-{self._count}", fingerprint, dict(items))
        self._last.update(dict.fromkeys(items, len(self._recent)))
        self._recent.append(place)
        return place

    def _join(self, place: Place, items: Mapping[int, Rich]) -> None:
        lead = place.lead
        place.members.update(items)
        self._last.update(dict.fromkeys(items, self._recent.index(place)))
        self._changed[place.display_id] = place  # the one on the screen may have moved on since
        self._label(place, update=True)
        if place.lead != lead:
            rich = place.members[place.lead]
            self._publish(place.display_id, rich.data, rich.metadata, update=True)

    def _label(self, place: Place, *, update: bool = False) -> None:
        """Show whose object it is; nothing above one that shows nothing, such as a bar that was taken away."""
        if self.is_labelled:
            is_blank = not place.members or place.members[place.lead].is_blank
            label = "" if is_blank else f"[{render_ranks(sorted(place.members))}]"
            data = {"text/plain": label, "text/html": _LABEL_HTML.format(label=label) if label else ""}
            self._publish(f"{place.display_id}-label", data, {}, update=update)

    def _publish(
        self, display_id: str, data: dict[str, Any], metadata: dict[str, Any], *, update: bool = False
    ) -> None:
        self._publisher().publish(data, metadata, transient={"display_id": display_id}, update=update)
