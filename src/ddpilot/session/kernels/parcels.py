# SPDX-License-Identifier: Apache-2.0
"""The parcels of one request: `LocalParcels` for ranks on this machine, `RelayedParcels` for those of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ddpilot.session.nodes.messages import ParcelAnswer
from ddpilot.session.nodes.node_ranks import NodeRanks
from ddpilot.session.protocol.parcels import ParcelCall


class ParcelCalls(Protocol):
    """The parcels of one request, which were sent."""

    def answer(self, rank: int) -> memoryview | None:
        """Return the parcel with which `rank` has replied, as `ParcelCall.answer`."""

    def close(self) -> None:
        """Expect no more replies."""


class LocalParcels:
    """Sends the parcel over the Unix socket of each rank; `paths` has the sockets by rank."""

    def __init__(self, paths: Mapping[int, Path], token: str, parcel: int | None) -> None:
        self._calls: dict[int, ParcelCall] = {}
        try:
            for rank, path in paths.items():
                self._calls[rank] = ParcelCall(path, token, parcel)
        except BaseException:
            self.close()
            raise

    def answer(self, rank: int) -> memoryview | None:
        """Return the parcel with which `rank` has replied."""
        return self._calls[rank].answer()

    def close(self) -> None:
        """Close the connections."""
        for call in self._calls.values():
            call.close()


class RelayedParcels:
    """The replies that the hosts of `nodes` pass on: each arrives before the rank's report."""

    def __init__(self, nodes: NodeRanks, token: str) -> None:
        self._nodes = nodes
        self._token = token
        self._answers: dict[int, bytes] = {}

    def put(self, answer: ParcelAnswer) -> None:
        """Take a reply, in the I/O thread."""
        self._answers[answer.rank] = answer.data

    def answer(self, rank: int) -> memoryview | None:
        """Return the parcel with which `rank` has replied."""
        data = self._answers.pop(rank, None)
        return None if data is None else memoryview(bytearray(data))

    def close(self) -> None:
        """Tell the hosts that no more replies are expected."""
        self._nodes.close_parcel(self._token)
