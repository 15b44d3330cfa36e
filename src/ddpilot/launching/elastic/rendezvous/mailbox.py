# SPDX-License-Identifier: Apache-2.0
"""Mailbox for messages between the companions of several nodes, through the nodes' shared store."""

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
"""Seconds after a letter during which another one is likely."""

NUM_SLOTS = 16
"""Number of pieces of each node that are kept in the store."""

_ON_ITS_WAY_NS = 1_000_000_000
"""Maximum time in nanoseconds between writing a letter and its arrival in the store."""


class StoreMailbox:
    """A `Carrier` for one attempt. The thread that owns the connection calls `send` and `fetch`; `wake` wakes it.

    An idle mailbox causes no store traffic: the numbers of letters and pieces travel in `NodeState.letter` and
    `NodeState.num_pieces`.
    """

    def __init__(self, me: NodeState, attempt: int, wake: Callable[[], None]) -> None:
        self.attempt = attempt
        self._me = me
        self._wake = wake
        self._lock = threading.Lock()
        self._text = ""
        self._number = self._sent = 0
        self._letters: dict[int, Message] = {}
        self._places = {node: f"node {node}" for node in range(me.nnodes) if node != me.node_rank}
        self._unsent: deque[str] = deque(maxlen=NUM_SLOTS)
        self._num_appended = 0
        self._num_read: dict[int, int] = {}
        self._pieces: dict[int, deque[Chunk]] = {}
        self._looked_ns = 0
        self._busy_s = float("-inf")
        self._fault = ""

    @property
    def node_rank(self) -> int:
        """Rank of this node."""
        return self._me.node_rank

    @property
    def places(self) -> Mapping[int, str]:
        """The other nodes, with their hosts if known."""
        with self._lock:
            return dict(self._places)

    @property
    def letters(self) -> Mapping[int, Message]:
        """The most recent letter of each other node."""
        with self._lock:
            return dict(self._letters)

    @property
    def fault(self) -> str:
        """Why the connection was lost; empty while it works."""
        with self._lock:
            return self._fault

    @property
    def is_busy(self) -> bool:
        """True if letters were exchanged recently."""
        with self._lock:
            return time.monotonic() - self._busy_s < _BUSY_S

    def write(self, text: str) -> None:
        """Publish `text` to the other nodes as this node's letter."""
        with self._lock:
            self._text = text
            self._number += 1
            self._busy_s = time.monotonic()
        self._wake()

    def append(self, text: str) -> None:
        """Append `text` to this node's stream. Node 0 reads every stream; the other nodes read node 0's."""
        with self._lock:
            self._unsent.append(text)
            self._num_appended += 1
        self._wake()

    def take_pieces(self) -> Mapping[int, Sequence[Chunk]]:
        """Pieces received from other nodes since the last call, by node rank."""
        with self._lock:
            taken, self._pieces = self._pieces, {}
        return taken

    def break_off(self, error: Exception) -> None:
        """Record that the connection was lost because of `error`."""
        with self._lock:
            self._fault = str(error).partition("\n")[0] or type(error).__name__

    def send(self, store: Store) -> tuple[int, int]:
        """Write the newest letter and all pieces to the store. Returns the total numbers of letters and of pieces."""
        with self._lock:
            number, text = self._number, self._text
            pieces, last = list(self._unsent), self._num_appended
            self._unsent.clear()
        if number != self._sent:
            store.set(self._key(self.node_rank), text)
            self._sent = number
        for at, piece in enumerate(pieces, last - len(pieces) + 1):
            store.set(self._slot(self.node_rank, at), f"{at} {piece}")
        return number, last

    def fetch(self, store: Store, states: Iterable[NodeState], asked_ns: int) -> None:
        """Fetch what is new according to the other nodes' `states`, which were requested at `asked_ns`."""
        after_ns, self._looked_ns = self._looked_ns - _ON_ITS_WAY_NS, asked_ns
        here = [state for state in states if state.attempt == self.attempt]
        read = {node: letter.number for node, letter in self.letters.items()}
        new = [state for state in here if state.letter > read.get(state.node_rank, 0)]
        texts = store.multi_get([self._key(state.node_rank) for state in new]) if new else []
        read_ns = time.monotonic_ns()
        with self._lock:
            self._places.update({state.node_rank: state.place for state in here})
            for state, text in zip(new, texts, strict=True):
                self._letters[state.node_rank] = Message(text.decode(), state.letter, after_ns, read_ns)
                self._busy_s = time.monotonic()
        for state in here:
            if 0 in (self.node_rank, state.node_rank):
                self._fetch_pieces(store, state)

    def _fetch_pieces(self, store: Store, state: NodeState) -> None:
        read = self._num_read.get(state.node_rank, 0)
        numbers = range(max(read, state.num_pieces - NUM_SLOTS) + 1, state.num_pieces + 1)
        if not numbers:
            return
        texts = store.multi_get([self._slot(state.node_rank, number) for number in numbers])
        self._num_read[state.node_rank] = state.num_pieces
        read_ns = time.monotonic_ns()
        with self._lock:
            held = self._pieces.setdefault(state.node_rank, deque(maxlen=4 * NUM_SLOTS))
            for text in texts:
                number, _, piece = text.decode().partition(" ")
                held.append(Chunk(piece, int(number), read_ns))

    def _slot(self, node_rank: int, number: int) -> str:
        return f"piece/{self.attempt}/{node_rank}/{number % NUM_SLOTS}"

    def _key(self, node_rank: int) -> str:
        return f"letter/{self.attempt}/{node_rank}"
