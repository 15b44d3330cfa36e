# SPDX-License-Identifier: Apache-2.0
"""`RankMessage`, a message of a rank's kernel, and `RichOutput`: a figure, table or other display in it.

A fingerprint shows which displays look the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

_TEXT = "text/plain"
_HTML = "text/html"
WIDGET = "application/vnd.jupyter.widget-view+json"

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
_ELEMENT_ID = re.compile(r"""\bid=(?:"([^"]+)"|'([^']+)')""")
_UNSEEN = re.compile(r"<style\b.*?</style>|<!--.*?-->", re.DOTALL | re.IGNORECASE)

_SOURCE = re.compile(r"application/vnd\.[^;]*\+json")
"""MIME types of data that the front end renders, such as plotly's; their HTML is a fallback for other front ends."""


@dataclass(frozen=True)
class RankMessage:
    """A Jupyter iopub message from a rank's kernel.

    `kind`: "stream", "display_data", "execute_result", "update_display_data", "clear_output", "comm_open", "comm_msg"
    or "comm_close".
    """

    rank: int
    kind: str
    content: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    buffers: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class RichOutput:
    """A rich display of one rank. `display_id` is the rank's own id for it, or ""."""

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    display_id: str = ""
    fingerprint: str = ""
    """Equal for displays that look the same."""

    @property
    def text(self) -> str:
        """The plain-text representation, for front ends that show nothing richer."""
        return str(self.data.get(_TEXT, ""))

    @property
    def is_plain(self) -> bool:
        """True if it is plain text that cannot be updated, so that it can be shown as a line."""
        return not self.display_id and not set(self.data) - {_TEXT}

    @property
    def is_blank(self) -> bool:
        """True if nothing of it is visible: HTML without text or elements other than style sheets."""
        html = self.data.get(_HTML)
        return isinstance(html, str) and not set(self.data) - {_HTML, _TEXT} and not _UNSEEN.sub("", html).strip()

    @property
    def widget_id(self) -> str:
        """The model id if this is a widget, else ""."""
        return str(self.data[WIDGET].get("model_id", "")) if WIDGET in self.data else ""


def read_rich(message: RankMessage, widget: object = None) -> RichOutput:
    """Return the display in a "display_data", "execute_result" or "update_display_data" message.

    `widget`: the state of the widget if the display is one; its own data is just an id.
    """
    content = message.content
    data, metadata = content.get("data", {}), content.get("metadata", {})
    return RichOutput(
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
    """Replace element ids in `html` by numbers: libraries generate them at random, and they are not visible."""
    ids = dict.fromkeys(double or single for double, single in _ELEMENT_ID.findall(html))
    for number, name in enumerate(sorted(ids, key=len, reverse=True)):
        if len(name) >= 4:  # a shorter id may also occur in the text
            html = html.replace(name, f"id{number}")
    return html
