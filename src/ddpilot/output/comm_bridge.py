# SPDX-License-Identifier: Apache-2.0
"""`CommBridge`: connects widgets of ranks to the front end, by comms of the notebook's kernel with the same ids."""

from __future__ import annotations

import functools
from typing import Any

import comm

from ddpilot.output.view import RankMessage, SendToRank


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
