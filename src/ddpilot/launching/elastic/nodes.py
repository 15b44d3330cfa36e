# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a job tell each other, and how that reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddpilot.errors import DdpilotError, LaunchError, RankError, RendezvousError, WatchError
from ddpilot.findings.finding import Finding
from ddpilot.findings.sequence import Findings
from ddpilot.launching.contract import EXIT_REQUEUE
from ddpilot.launching.elastic.stopping import RunStoppedError

READY, DONE, ENDED = "ready", "done", "ended"


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """One node as it presents itself, again and again; `beat` grows each time.

    `attempt`: the restart that it is in, from 0; `phase`: "ready" to start or running, "done" (its ranks ended well),
    "ended" (it leaves). `ranks_port`: of node 0, where the ranks of this attempt find their store. `failure`: why it
    ended `attempt` or leaves, as `pack_error` made it. `letter`: how many letters its companion has written in
    `attempt`; `mark`: what its companion shows; `num_pieces`: how many it has appended.
    """

    node_rank: int
    host: str
    pid: int
    nnodes: int
    nproc_per_node: int
    target: str
    max_restarts: int = 0
    beat: int = 0
    attempt: int = 0
    phase: str = READY
    ranks_port: int = 0
    failure: Mapping[str, Any] | None = None
    letter: int = 0
    mark: str = ""
    num_pieces: int = 0
    failed_attempt: int = -1
    """The last attempt that ended by a failure on this node."""

    @property
    def place(self) -> str:
        """Node and host: "node 1 (myhost)"."""
        return f"node {self.node_rank} ({self.host})"

    def is_same_process(self, other: NodeState) -> bool:
        """Whether both are the same agent."""
        return (self.host, self.pid) == (other.host, other.pid)

    def encode(self) -> str:
        """As text for the store."""
        return json.dumps(asdict(self))


def decode_state(text: str | bytes) -> NodeState:
    """A state from the store's text."""
    return NodeState(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class View:
    """What this node knows of the others at one moment.

    `states`: of every node that has come, itself included; `silent_s`: seconds since the last sign of each other node;
    `link_error`: why the connection to node 0's store has ended, None while it has not.
    """

    states: Mapping[int, NodeState] = field(default_factory=dict)
    silent_s: Mapping[int, float] = field(default_factory=dict)
    link_error: Exception | None = None


def render_nodes(nodes: Iterable[int], states: Mapping[int, NodeState]) -> str:
    """Nodes with their hosts where they are known: "node 1 (myhost), node 2"."""
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
                    "comparing what the nodes were started with",
                    found=f"{mine.place} has {option} {ours}, {other.place} has {option} {theirs}",
                    fix=f"Start every node with the same {option}",
                )


def pack_error(error: DdpilotError) -> dict[str, Any]:
    """What another node needs to show `error` as its own."""
    names = ["did", "found", "fix"]
    if isinstance(error, RankError):
        names += ["rank", "host", "exitcode", "signal_name", "rank_traceback", "last_lines"]
    if isinstance(error, RunStoppedError):
        names += ["exitcode"]
    said = {name: getattr(error, name) for name in names}
    if isinstance(error, (RankError, WatchError)):
        said["findings"] = [finding.to_dict() for finding in error.findings]
    return said


def unpack_error(said: Mapping[str, Any], others: str) -> RankError | LaunchError:
    """The error that another node packed; `others`: what became of this node's ranks."""
    values = dict(said)
    findings = Findings(map(Finding.from_dict, values.pop("findings", ())))
    if "rank" not in said:
        values.pop("exitcode", None)  # of the other node: what this one ends with is decided here
        return WatchError(**values, findings=findings) if findings else LaunchError(**values)
    error = RankError(**{**values, "last_lines": tuple(said["last_lines"]), "others": others})
    error.findings = findings
    return error


def asks_for_requeue(failure: Mapping[str, Any] | None) -> bool:
    """True if a node packed `failure` because its ranks left with the exit code that asks for a requeue."""
    return failure is not None and failure.get("exitcode") == EXIT_REQUEUE


def with_failure(state: NodeState, error: DdpilotError) -> NodeState:
    """`state` of a node whose present attempt ended by `error`."""
    packed = pack_error(error)
    if isinstance(error, WatchError):  # what it says to do is to be done on this machine
        packed["fix"] += f" on {state.place}"
    return replace(state, failure=packed, failed_attempt=state.attempt)
