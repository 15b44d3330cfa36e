# SPDX-License-Identifier: Apache-2.0
"""Messages as ranks publish them."""

from __future__ import annotations

from typing import Any

from ddpilot.output.rich_output import RankMessage


def printed(rank: int, text: str, stream: str = "stdout") -> RankMessage:
    """What `print` publishes."""
    return RankMessage(rank, "stream", {"name": stream, "text": text})


def displayed(
    rank: int, data: dict[str, Any], display_id: str = "", kind: str = "display_data", **metadata: Any
) -> RankMessage:
    """What `display` publishes."""
    transient = {"display_id": display_id} if display_id else {}
    return RankMessage(rank, kind, {"data": data, "metadata": metadata, "transient": transient})


def html(rank: int, text: str, display_id: str = "", kind: str = "display_data") -> RankMessage:
    """What `display(HTML(text))` publishes."""
    data = {"text/plain": "<IPython.core.display.HTML object>", "text/html": text}
    return displayed(rank, data, display_id, kind)


def opened(rank: int, comm_id: str, /, **state: Any) -> RankMessage:
    """What a new widget publishes."""
    content = {"comm_id": comm_id, "target_name": "jupyter.widget", "data": {"state": state, "buffer_paths": []}}
    return RankMessage(rank, "comm_open", content, {"version": "2.1.0"})


def changed(rank: int, comm_id: str, /, **state: Any) -> RankMessage:
    """What a widget publishes when its state changes."""
    return RankMessage(rank, "comm_msg", {"comm_id": comm_id, "data": {"method": "update", "state": state}})


def closed(rank: int, comm_id: str) -> RankMessage:
    """What a closed widget publishes."""
    return RankMessage(rank, "comm_close", {"comm_id": comm_id, "data": {}})


def widget(rank: int, comm_id: str) -> RankMessage:
    """What displaying a widget publishes."""
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": comm_id}, "text/plain": "Bar()"}
    return displayed(rank, view)
