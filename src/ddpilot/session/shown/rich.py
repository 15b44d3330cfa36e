# SPDX-License-Identifier: Apache-2.0
"""Figures, tables and other rich objects of ranks, and whether two of them look the same."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from ddpilot.session.view import RankMessage

_TEXT = "text/plain"
_HTML = "text/html"
WIDGET = "application/vnd.jupyter.widget-view+json"

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
_ELEMENT_ID = re.compile(r"""\bid=(?:"([^"]+)"|'([^']+)')""")
_UNSEEN = re.compile(r"<style\b.*?</style>|<!--.*?-->", re.DOTALL | re.IGNORECASE)

_SOURCE = re.compile(r"application/vnd\.[^;]*\+json")
"""Data from which the front end draws, such as plotly's; the HTML beside it is for those that cannot."""


@dataclass(frozen=True)
class Rich:
    """A display of one rank. `display_id`: as the rank knows it, "" where it gave none."""

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    display_id: str = ""
    fingerprint: str = ""
    """The same for displays that look the same."""

    @property
    def text(self) -> str:
        """The object as text, for where nothing richer can be shown."""
        return str(self.data.get(_TEXT, ""))

    @property
    def is_plain(self) -> bool:
        """Whether it is text that nothing will ever change: a line is enough for it."""
        return not self.display_id and not set(self.data) - {_TEXT}

    @property
    def is_blank(self) -> bool:
        """True if nothing of it can be seen: HTML without a word or an element but style sheets."""
        html = self.data.get(_HTML)
        return isinstance(html, str) and not set(self.data) - {_HTML, _TEXT} and not _UNSEEN.sub("", html).strip()

    @property
    def widget_id(self) -> str:
        """The model's id where this is a widget, else ""."""
        return str(self.data[WIDGET].get("model_id", "")) if WIDGET in self.data else ""


def read_rich(message: RankMessage, widget: object = None) -> Rich:
    """The display in a "display_data", "execute_result" or "update_display_data" message.

    `widget`: what the widget shows, where it is one; its own data has nothing but an id.
    """
    content = message.content
    data, metadata = content.get("data", {}), content.get("metadata", {})
    return Rich(
        data=data,
        metadata=metadata,
        display_id=str(content.get("transient", {}).get("display_id", "")),
        fingerprint=_fingerprint(data, metadata, widget),
    )


def _fingerprint(data: dict[str, Any], metadata: dict[str, Any], widget: object) -> str:
    seen = dict(data)
    if widget is not None:
        seen = {WIDGET: widget}
    elif any(_SOURCE.fullmatch(kind) for kind in seen):
        seen.pop(_HTML, None)
    if isinstance(seen.get(_HTML), str):
        seen[_HTML] = _without_ids(seen[_HTML])
    if isinstance(seen.get(_TEXT), str):
        seen[_TEXT] = _ADDRESS.sub("0x", seen[_TEXT]) if len(seen) > 1 else seen[_TEXT]
    text = json.dumps([seen, metadata], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _without_ids(html: str) -> str:
    """`html` with its elements' ids numbered: libraries draw them at random, and nobody sees them."""
    ids = dict.fromkeys(double or single for double, single in _ELEMENT_ID.findall(html))
    for number, name in enumerate(sorted(ids, key=len, reverse=True)):
        if len(name) >= 4:  # a short one may stand in the text by chance
            html = html.replace(name, f"id{number}")
    return html
