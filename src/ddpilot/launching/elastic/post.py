# SPDX-License-Identifier: Apache-2.0
"""Letters between the companions of several nodes, through the store that the nodes have in common."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ddpilot.launching.companion import Letter, Piece
from ddpilot.launching.elastic.nodes import NodeState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BUSY_S = 3.0
"""So long after a letter another one is likely."""

NUM_SLOTS = 16
"""So many pieces of each node stay in the store."""

_ON_ITS_WAY_NS = 1_000_000_000
"""Between the writing of a letter and the moment at which the store has it."""


class Post:
    """A `Carrier` for one attempt. `send` and `fetch` are for the thread that has the connection, which `wake` wakes.

    Nothing is read or written while nobody writes: that there is a letter is said in `NodeState.letter`, and marks go
    along in `NodeState.mark`. How many pieces there are is said in `NodeState.num_pieces`.
    """

    def __init__(self, me: NodeState, attempt: int, wake: Callable[[], None]) -> None:
        self.attempt = attempt
        self._me = me
        self._wake = wake
        self._lock = threading.Lock()
        self._text = ""
        self._number = self._sent = 0
        self._letters: dict[int, Letter] = {}
        self._places = {node: f"node {node}" for node in range(me.nnodes) if node != me.node_rank}
        self._marks: dict[int, str] = {}
        self._mark = ""
        self._unsent: deque[str] = deque(maxlen=NUM_SLOTS)
        self._num_appended = 0
        self._num_read: dict[int, int] = {}
        self._pieces: dict[int, deque[Piece]] = {}
        self._looked_ns = 0
        self._busy_s = float("-inf")
        self._fault = ""

    @property
    def node_rank(self) -> int:
        """The number of this node."""
        return self._me.node_rank

    @property
    def places(self) -> Mapping[int, str]:
        """The other nodes, with their hosts where they are known."""
        with self._lock:
            return dict(self._places)

    @property
    def letters(self) -> Mapping[int, Letter]:
        """The last one of each other node."""
        with self._lock:
            return dict(self._letters)

    @property
    def marks(self) -> Mapping[int, str]:
        """What each other node shows."""
        with self._lock:
            return dict(self._marks)

    @property
    def mark(self) -> str:
        """What this node shows."""
        with self._lock:
            return self._mark

    @property
    def fault(self) -> str:
        """Why the connection has ended."""
        with self._lock:
            return self._fault

    @property
    def is_busy(self) -> bool:
        """Whether letters have gone to and fro lately."""
        with self._lock:
            return time.monotonic() - self._busy_s < _BUSY_S

    def write(self, text: str) -> None:
        """Let the other nodes read `text`."""
        with self._lock:
            self._text = text
            self._number += 1
            self._busy_s = time.monotonic()
        self._wake()

    def show(self, mark: str) -> None:
        """Let the other nodes see `mark`."""
        with self._lock:
            self._mark = mark

    def append(self, text: str) -> None:
        """Let node 0 read `text` after all that was appended before; of node 0 itself: all the others."""
        with self._lock:
            self._unsent.append(text)
            self._num_appended += 1
        self._wake()

    def take_pieces(self) -> Mapping[int, Sequence[Piece]]:
        """What other nodes have appended for this one since the last call, by their numbers."""
        with self._lock:
            taken, self._pieces = self._pieces, {}
        return taken

    def break_off(self, error: Exception) -> None:
        """The connection has ended by `error`."""
        with self._lock:
            self._fault = str(error).partition("\n")[0] or type(error).__name__

    def send(self, store: Store) -> tuple[int, int]:
        """Put the newest letter and all pieces into the store; how many of each were written."""
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
        """Take what is new by the other nodes' `states`, which the store was asked for at `asked_ns`."""
        after_ns, self._looked_ns = self._looked_ns - _ON_ITS_WAY_NS, asked_ns
        here = [state for state in states if state.attempt == self.attempt]
        read = {node: letter.number for node, letter in self.letters.items()}
        new = [state for state in here if state.letter > read.get(state.node_rank, 0)]
        texts = store.multi_get([self._key(state.node_rank) for state in new]) if new else []
        read_ns = time.monotonic_ns()
        with self._lock:
            self._places.update({state.node_rank: state.place for state in here})
            self._marks.update({state.node_rank: state.mark for state in here})
            for state, text in zip(new, texts, strict=True):
                self._letters[state.node_rank] = Letter(text.decode(), state.letter, after_ns, read_ns)
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
                held.append(Piece(piece, int(number), read_ns))

    def _slot(self, node_rank: int, number: int) -> str:
        return f"piece/{self.attempt}/{node_rank}/{number % NUM_SLOTS}"

    def _key(self, node_rank: int) -> str:
        return f"letter/{self.attempt}/{node_rank}"
