# SPDX-License-Identifier: Apache-2.0
"""Exchange the states of a job's nodes, and messages of their observers, through the store."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpilot.errors import DdpilotError, LaunchError, RankError, RendezvousError, WatchError
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.launching.elastic.options import RunStoppedError
from ddpilot.launching.observer import Chunk, Message
from ddpilot.launching.rank_environment import EXIT_REQUEUE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


READY, DONE, ENDED = "ready", "done", "ended"


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """State of one node, published repeatedly; `beat` increases each time.

    `attempt`: number of the restart, from 0, or -1 until the node is ready for the first attempt; `phase`: "ready" (to
    start, or running), "done" (its ranks succeeded) or "ended" (it leaves). `ranks_port`: on node 0, port of the store
    for the ranks of this attempt. `failure`: the error that ended `attempt`, or with which the node leaves, as returned
    by `pack_error`. `num_messages`, `num_chunks`: how many its observer has written and appended in `attempt`.
    """

    node_rank: int
    host: str
    pid: int
    nnodes: int
    nproc_per_node: int
    target: str
    max_restarts: int = 0
    beat: int = 0
    attempt: int = -1
    phase: str = READY
    ranks_port: int = 0
    failure: Mapping[str, Any] | None = None
    num_messages: int = 0
    num_chunks: int = 0
    failed_attempt: int = -1
    """The last attempt that ended with a failure on this node, or -1."""

    @property
    def place(self) -> str:
        """Node and host: "node 1 (myhost)"."""
        return f"node {self.node_rank} ({self.host})"

    def encode(self) -> str:
        """Encode as text for the store."""
        return json.dumps(asdict(self))


def decode_state(text: str | bytes) -> NodeState:
    """Decode a state from the store's text."""
    return NodeState(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class NodesView:
    """The other nodes as seen from this node at one moment.

    `states`: of every node that has joined, including this one; `silent_s`: seconds since the last heartbeat of each
    other node; `link_error`: the error of the connection to node 0's store, None while it works.
    """

    states: Mapping[int, NodeState] = field(default_factory=dict)
    silent_s: Mapping[int, float] = field(default_factory=dict)
    link_error: Exception | None = None


def render_nodes(nodes: Iterable[int], states: Mapping[int, NodeState]) -> str:
    """Nodes with their hosts if known: "node 1 (myhost), node 2"."""
    return ", ".join(states[node].place if node in states else f"node {node}" for node in sorted(nodes))


def check_agreement(mine: NodeState, states: Mapping[int, NodeState]) -> None:
    """Raise RendezvousError if a node was started with a different `--nnodes` or `--max-restarts`."""
    for other in states.values():
        for option, ours, theirs in (
            ("--nnodes", mine.nnodes, other.nnodes),
            ("--max-restarts", mine.max_restarts, other.max_restarts),
        ):
            if ours != theirs:
                raise RendezvousError(
                    "comparing the options of the nodes",
                    found=f"{mine.place} has {option} {ours}, {other.place} has {option} {theirs}",
                    fix=f"Start every node with the same {option}",
                )


def pack_error(error: DdpilotError) -> dict[str, Any]:
    """Serialize `error` so that a different node can raise it."""
    names = ["did", "found", "fix"]
    if isinstance(error, RankError):
        names += ["rank", "host", "exitcode", "signal_name", "rank_traceback", "last_lines"]
    if isinstance(error, RunStoppedError):
        names += ["exitcode"]
    packed = {name: getattr(error, name) for name in names}
    if isinstance(error, (RankError, WatchError)):
        packed["findings"] = [finding.to_dict() for finding in error.findings]
    return packed


def unpack_error(packed: Mapping[str, Any], others: str) -> RankError | LaunchError:
    """Rebuild an error that a different node packed. `others`: how the ranks of this node ended."""
    values = dict(packed)
    findings = Findings(map(Finding.from_dict, values.pop("findings", ())))
    if "rank" not in packed:
        values.pop("exitcode", None)  # it is the other node's; this node determines its own
        return WatchError(**values, findings=findings) if findings else LaunchError(**values)
    error = RankError(**{**values, "last_lines": tuple(packed["last_lines"]), "others": others})
    error.findings = findings
    return error


def asks_for_requeue(failure: Mapping[str, Any]) -> bool:
    """True if `failure` was packed because ranks exited with the code that asks for a requeue."""
    return bool(failure.get("exitcode") == EXIT_REQUEUE)


def with_failure(state: NodeState, error: DdpilotError) -> NodeState:
    """Return `state` with `error` as the failure of its current attempt."""
    packed = pack_error(error)
    if isinstance(error, WatchError):  # its advice is for this machine
        packed["fix"] += f" on {state.place}"
    return replace(state, failure=packed, failed_attempt=state.attempt)


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
