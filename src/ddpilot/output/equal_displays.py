# SPDX-License-Identifier: Apache-2.0
"""`SharedDisplays`: rich displays of ranks in a notebook, one for all ranks whose display looks the same."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddpilot.findings.text import render_ranks
from ddpilot.output.rich_output import RichOutput

# Has the style and horizontal position of the label of a line.
_LABEL_STYLE = (
    "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,inherit);"
    "padding-left:calc(2px + var(--jp-code-padding,0px));margin-top:4px;opacity:.75"
)
_LABEL_HTML = f'<div style="{_LABEL_STYLE}">{{label}}</div>'


class Publisher(Protocol):
    """IPython's display publisher, which `%%capture` replaces during a cell."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
    ) -> None:
        """Show a display, or with `update` replace the content of those with the same display id."""

    def clear_output(self, wait: bool = False) -> None:
        """Clear the cell's output."""


@dataclass
class SharedDisplay:
    """One display in the notebook, below a label that is itself a display, so that it can be updated."""

    display_id: str
    fingerprint: str
    """Fingerprint of what was first shown here, by which displays of slower ranks are matched."""

    members: dict[int, RichOutput] = field(default_factory=dict)
    """By rank: what it shows here now. The lowest rank's display is visible."""

    @property
    def lead(self) -> int:
        """The rank whose display is visible."""
        return min(self.members)


class SharedDisplays:
    """All displays of one session. `publisher()` returns the notebook's current publisher.

    `pair(shown, alike)` is called for widgets that share a place: the id of the visible one, and the other ids by rank.
    """

    def __init__(self, publisher: Callable[[], Publisher], pair: Callable[[str, dict[int, str]], None]) -> None:
        self._publisher = publisher
        self._pair = pair
        self._prefix = f"ddpilot-{uuid.uuid4().hex[:12]}"
        self._count = 0
        self._recent: list[SharedDisplay] = []  # displays of this cell, in order
        self._last: dict[int, int] = {}  # by rank: index of its last place in `_recent`
        self._by_id: dict[tuple[int, str], SharedDisplay] = {}  # by rank and the rank's own display id
        self._changed: dict[str, SharedDisplay] = {}
        self.is_labelled = True

    def begin(self) -> None:
        """A cell starts: its displays are not merged with those of earlier cells."""
        self._recent.clear()
        self._last.clear()

    def show(self, items: Mapping[int, RichOutput]) -> SharedDisplay | None:
        """Show displays that look the same. Return the new place, or None if they were added to an existing one."""
        for rank, rich in items.items():
            if (rank, rich.display_id) in self._by_id:
                self.update({rank: rich})  # shown again with the same id: earlier displays with it change too
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

    def update(self, items: Mapping[int, RichOutput]) -> None:
        """Replace the content of displays with the same display ids. Unknown ids are ignored, as in Jupyter."""
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

    def settle(self) -> list[SharedDisplay]:
        """At the end of a cell, give ranks whose display differs from the visible one a place of their own.

        During a cell, ranks may differ because one is ahead.
        """
        new = []
        for place in self._changed.values():
            shown = place.members[place.lead].fingerprint if place.members else ""
            apart: dict[str, dict[int, RichOutput]] = {}
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

    def reshow(self, place: SharedDisplay) -> None:
        """Show a place with its label."""
        self._label(place)
        rich = place.members[place.lead]
        self._publish(place.display_id, rich.data, rich.metadata)

    def _find(self, items: Mapping[int, RichOutput]) -> SharedDisplay | None:
        after = max(self._last.get(rank, -1) for rank in items)
        fingerprint = next(iter(items.values())).fingerprint
        for place in self._recent[after + 1 :]:
            if place.fingerprint == fingerprint and place.members and not set(items) & set(place.members):
                return place
        return None

    def _add(self, items: Mapping[int, RichOutput]) -> SharedDisplay:
        self._count += 1
        fingerprint = next(iter(items.values())).fingerprint
        place = SharedDisplay(f"{self._prefix}-{self._count}", fingerprint, dict(items))
        self._last.update(dict.fromkeys(items, len(self._recent)))
        self._recent.append(place)
        return place

    def _join(self, place: SharedDisplay, items: Mapping[int, RichOutput]) -> None:
        lead = place.lead
        place.members.update(items)
        self._last.update(dict.fromkeys(items, self._recent.index(place)))
        self._changed[place.display_id] = place  # the visible one may have been updated since
        self._label(place, update=True)
        if place.lead != lead:
            rich = place.members[place.lead]
            self._publish(place.display_id, rich.data, rich.metadata, update=True)

    def _label(self, place: SharedDisplay, *, update: bool = False) -> None:
        """Show the label with the ranks of the place; "" if its display is blank, such as a removed progress bar."""
        if self.is_labelled:
            is_blank = not place.members or place.members[place.lead].is_blank
            label = "" if is_blank else f"[{render_ranks(sorted(place.members))}]"
            data = {"text/plain": label, "text/html": _LABEL_HTML.format(label=label) if label else ""}
            self._publish(f"{place.display_id}-label", data, {}, update=update)

    def _publish(
        self, display_id: str, data: dict[str, Any], metadata: dict[str, Any], *, update: bool = False
    ) -> None:
        self._publisher().publish(data, metadata, transient={"display_id": display_id}, update=update)
