# SPDX-License-Identifier: Apache-2.0
"""`StoreMailbox`: messages between the observers of several nodes, through the nodes' shared store."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ddpilot.launching.elastic.rendezvous.node_state import NodeState
from ddpilot.launching.observer import Chunk, Message

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BUSY_S = 3.0
"""Seconds after a message during which more messages are likely."""

NUM_SLOTS = 16
"""Number of chunks of each node that the store keeps."""

_TRANSIT_NS = 1_000_000_000
"""Maximum time in nanoseconds from writing a message until it is in the store."""


class StoreMailbox:
    """A `Mailbox` for one attempt. The thread that owns the connection calls `send` and `fetch`; `wake` wakes it.

    An idle mailbox causes no store traffic: the numbers of messages and chunks travel in `NodeState.num_messages` and
    `NodeState.num_chunks`.
    """

    def __init__(self, me: NodeState, attempt: int, wake: Callable[[], None]) -> None:
        self.attempt = attempt
        self._me = me
        self._wake = wake
        self._lock = threading.Lock()
        self._text = ""
        self._number = self._sent = 0
        self._messages: dict[int, Message] = {}
        self._places = {node: f"node {node}" for node in range(me.nnodes) if node != me.node_rank}
        self._unsent: deque[str] = deque(maxlen=NUM_SLOTS)
        self._num_appended = 0
        self._num_read: dict[int, int] = {}
        self._chunks: dict[int, deque[Chunk]] = {}
        self._fetched_ns = 0
        self._busy_s = float("-inf")
        self._fault = ""

    @property
    def node_rank(self) -> int:
        return self._me.node_rank

    @property
    def places(self) -> Mapping[int, str]:
        with self._lock:
            return dict(self._places)

    @property
    def messages(self) -> Mapping[int, Message]:
        with self._lock:
            return dict(self._messages)

    @property
    def fault(self) -> str:
        with self._lock:
            return self._fault

    @property
    def is_busy(self) -> bool:
        """True if messages were exchanged recently."""
        with self._lock:
            return time.monotonic() - self._busy_s < _BUSY_S

    def write(self, text: str) -> None:
        with self._lock:
            self._text = text
            self._number += 1
            self._busy_s = time.monotonic()
        self._wake()

    def append(self, text: str) -> None:
        with self._lock:
            self._unsent.append(text)
            self._num_appended += 1
        self._wake()

    def take_chunks(self) -> Mapping[int, Sequence[Chunk]]:
        with self._lock:
            taken, self._chunks = self._chunks, {}
        return taken

    def break_off(self, error: Exception) -> None:
        """Record that the connection was lost because of `error`."""
        with self._lock:
            self._fault = str(error).partition("\n")[0] or type(error).__name__

    def send(self, store: Store) -> tuple[int, int]:
        """Write the newest message and all chunks to the store. Returns the total numbers of messages and of chunks."""
        with self._lock:
            number, text = self._number, self._text
            chunks, last = list(self._unsent), self._num_appended
            self._unsent.clear()
        if number != self._sent:
            store.set(self._key(self.node_rank), text)
            self._sent = number
        for at, chunk in enumerate(chunks, last - len(chunks) + 1):
            store.set(self._slot(self.node_rank, at), f"{at} {chunk}")
        return number, last

    def fetch(self, store: Store, states: Iterable[NodeState], asked_ns: int) -> None:
        """Fetch what is new according to the other nodes' `states`, which were requested at `asked_ns`."""
        after_ns, self._fetched_ns = self._fetched_ns - _TRANSIT_NS, asked_ns
        here = [state for state in states if state.attempt == self.attempt]
        read = {node: message.number for node, message in self.messages.items()}
        new = [state for state in here if state.num_messages > read.get(state.node_rank, 0)]
        texts = store.multi_get([self._key(state.node_rank) for state in new]) if new else []
        read_ns = time.monotonic_ns()
        with self._lock:
            self._places.update({state.node_rank: state.place for state in here})
            for state, text in zip(new, texts, strict=True):
                self._messages[state.node_rank] = Message(text.decode(), state.num_messages, after_ns, read_ns)
                self._busy_s = time.monotonic()
        for state in here:
            if 0 in (self.node_rank, state.node_rank):
                self._fetch_chunks(store, state)

    def _fetch_chunks(self, store: Store, state: NodeState) -> None:
        read = self._num_read.get(state.node_rank, 0)
        numbers = range(max(read, state.num_chunks - NUM_SLOTS) + 1, state.num_chunks + 1)
        if not numbers:
            return
        texts = store.multi_get([self._slot(state.node_rank, number) for number in numbers])
        self._num_read[state.node_rank] = state.num_chunks
        read_ns = time.monotonic_ns()
        with self._lock:
            held = self._chunks.setdefault(state.node_rank, deque(maxlen=4 * NUM_SLOTS))
            for text in texts:
                number, _, chunk = text.decode().partition(" ")
                held.append(Chunk(chunk, int(number), read_ns))

    def _slot(self, node_rank: int, number: int) -> str:
        return f"chunk/{self.attempt}/{node_rank}/{number % NUM_SLOTS}"

    def _key(self, node_rank: int) -> str:
        return f"message/{self.attempt}/{node_rank}"
