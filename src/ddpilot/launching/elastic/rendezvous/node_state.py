# SPDX-License-Identifier: Apache-2.0
"""State that the nodes of a job exchange through the store, and its encoding."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddpilot.errors import DdpilotError, LaunchError, RankError, RendezvousError, WatchError
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.launching.elastic.signals import RunStoppedError
from ddpilot.launching.rank_environment import EXIT_REQUEUE

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
