# SPDX-License-Identifier: Apache-2.0
"""`NodeRanks`: a `RankSpawner` whose ranks run on other machines, each started by the host process of its node."""

from __future__ import annotations

import itertools
import os
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ddpilot.errors import LaunchError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.rank_environment import NodePlacement, default_variables, import_time_variables
from ddpilot.launching.rank_reports import Raised, Returned
from ddpilot.launching.rank_server import job
from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.memory_file import map_private
from ddpilot.launching.spawning import SERVER_GONE, Ended, EventLoop, Reported, SpawnerEvent, Wrote
from ddpilot.record.flight_ring.layout import CLOCK_AHEAD_NS
from ddpilot.record.hook import RING_DIR_VARIABLE
from ddpilot.record.journal import CLOCK_AHEAD_NS as JOURNAL_CLOCK_AHEAD_NS
from ddpilot.session.nodes import messages
from ddpilot.session.nodes.node import Node

START_LIMIT_S = 120.0
_FORWARDED = ("NCCL_", "GLOO_", "HF_")
_OF_A_MACHINE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_PRELOAD")


class Cluster(Protocol):
    """Starts the hosts of a session."""

    def open(self, directory: str) -> list[Node]:
        """Start all hosts and return them once they are connected. Raises LaunchError, and leaves nothing then."""

    def reopen(self, node: Node, directory: str) -> None:
        """Start the host of a lost node again, and connect to it. Raises LaunchError."""

    def describe_job_end(self) -> str:
        """Return how the job of the nodes has ended, as a sentence; "" if it has not, or if there is none."""

    def close(self) -> None:
        """Release what started the hosts, which have ended or are lost."""


@dataclass(frozen=True)
class NodeLoss:
    """Ranks that were lost with their node, or with the job of all nodes. `text` is a sentence about it."""

    ranks: tuple[int, ...]
    text: str


class NodeRanks:
    """The ranks of several nodes. Connects to the nodes on construction; raises LaunchError if one cannot be used.

    `variables`: the `env` of the session. `relay` is called with messages of kernels and answers, in the event loop's
    thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        options: LaunchOptions,
        variables: Mapping[str, str],
        note: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._variables = {**_forwarded(os.environ), **variables}
        self._note = note
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[Node, Future[Any]]] = {}
        self._asking = threading.Lock()
        self._live: dict[int, int | None] = {}
        self._keys: dict[int, tuple[str, bytes]] = {}
        self._mirror: Path | None = None
        self._hooks: tuple[tuple[str, ...], Mapping[str, str]] = ((), {})
        self._unwatched: list[Node] = []
        self._job_end = ""
        """How the job of the nodes has ended; "" while it runs."""
        self._directory = os.getcwd()
        self._launch_id = uuid.uuid4().hex
        self._is_closed = False
        self.relay: Callable[[messages.KernelFrames | messages.ParcelAnswer], None] = lambda message: None
        self.nodes: list[Node] = []
        try:
            self.nodes = cluster.open(self._directory)
            for node in self.nodes:
                node.hello = node.receive((messages.HostHello,), START_LIMIT_S)
                if node.hello.step:
                    node.name, node.step = node.hello.node, node.hello.step
            _check_versions(self.nodes)
            sizes = [_count(options.nproc_per_node, node) for node in self.nodes]
        except BaseException:
            self.close()
            raise
        self.world_size = sum(sizes)
        for node, first, size in zip(self.nodes, itertools.accumulate([0, *sizes]), sizes, strict=False):
            node.placement = NodePlacement(
                world_size=self.world_size,
                local_world_size=size,
                first_rank=first,
                node_rank=node.node_rank,
                num_nodes=len(sizes),
                master_addr=self.nodes[0].hello.master_addr,
            )
        self._master_port = self.nodes[0].hello.master_port
        self._by_rank = {rank: node for node in self.nodes for rank in node.placement.ranks}

    @property
    def can_start(self) -> bool:
        return not self._is_closed and any(not node.is_lost for node in self.nodes)

    def clock_error_s(self) -> float:
        """Return how far the clock of a node may have moved away from this machine's."""
        return max(node.clock_error_s() for node in self.nodes)

    def node_of(self, rank: int) -> Node:
        """Return the node on which a rank runs."""
        return self._by_rank[rank]

    def find_loss(self, rank: int) -> NodeLoss | None:
        """Return what was lost with the node of a rank; None if the node is not lost."""
        node = self._by_rank[rank]
        if not node.was_lost or node.link is None:
            return None
        ranks = tuple(range(self.world_size) if self._job_end else node.placement.ranks)
        verb = "was" if len(ranks) == 1 else "were"
        if self._job_end:
            return NodeLoss(ranks, f"{render_ranks(ranks)} {verb} lost: {self._job_end}")
        return NodeLoss(ranks, f"{render_ranks(ranks)} {verb} lost with node {node.name}, which {node.why_lost}")

    def attach(self, loop: EventLoop, emit: Callable[[SpawnerEvent], object]) -> None:
        self._loop, self._emit = loop, emit
        for node in self.nodes:
            self._prepare(node)
        for node in self.nodes:
            self._await_prepared(node)
        for node in self.nodes:
            self._watch(node)

    def _prepare(self, node: Node) -> None:
        if not node.hello.has_directory:
            self._note(f"node {node.name} has no folder {self._directory}: its ranks start in the home folder")
        defaults = {name: value for name, value in default_variables(stays=True).items() if "SOCKET" not in name}
        node.send(
            messages.Prepare(
                options=replace(self._options, env={}),
                variables=self._variables,
                defaults=defaults,
                placement=node.placement,
                master_port=self._master_port,
                launch_id=self._launch_id,
                argv=list(sys.argv),
            )
        )

    def _await_prepared(self, node: Node) -> None:
        answer = node.receive((messages.Prepared, messages.NotPrepared), START_LIMIT_S)
        if isinstance(answer, messages.NotPrepared):
            raise LaunchError(f"{answer.did} on node {node.name}", found=answer.found, fix=answer.fix)
        node.folder = answer.folder
        for text in answer.notes:
            self._note(f"node {node.name}: {text}")
        node.compare_clocks(START_LIMIT_S)

    def _watch(self, node: Node) -> None:
        assert node.link is not None
        self._loop.watch(node.link.fileno(), lambda: self._on_link(node))

    def add_hooks(self, hooks: tuple[str, ...], variables: Mapping[str, str]) -> None:
        self._mirror = Path(variables[RING_DIR_VARIABLE])
        self._hooks = hooks, variables
        for node in self.nodes:
            node.send(messages.AddHooks(hooks, variables))

    def prepare_kernel(self, rank: int, stem: str, key: bytes) -> None:
        """Note how the files of the rank's next kernel are called, and the key that it signs with."""
        self._keys[rank] = stem, key

    def reopen(self, ranks: Sequence[int]) -> None:
        """Start the hosts of those nodes of `ranks` again that were lost, which takes seconds.

        Do not call it in the event loop's thread. Raises LaunchError if that fails.
        """
        for node, _ in self._by_node(ranks):
            if node.is_lost and not self._is_closed:
                self._reopen(node)

    def _reopen(self, node: Node) -> None:
        if self._job_end or node.node_rank == 0:
            without_store = "the session's store ran there, without which no process group can be formed"
            raise LaunchError(
                f"starting node {node.name} again",
                found=self._job_end or without_store,
                fix="`%ddp stop`, then `%ddp start` (a new `Session`) starts from scratch",
            )
        node.close_link()
        self._cluster.reopen(node, self._directory)
        node.hello = node.receive((messages.HostHello,), START_LIMIT_S)
        _check_versions(self.nodes)
        self._prepare(node)
        self._await_prepared(node)
        node.send(messages.AddHooks(*self._hooks))
        node.is_lost = node.was_lost = False
        self._unwatched.append(node)

    def start(self, rank: int, parcel: int, name: str, *, sources: dict[str, list[str]], restart: int = 0) -> None:  # noqa: ARG002
        node = self._by_rank[rank]
        while self._unwatched:
            self._watch(self._unwatched.pop())
        if node.is_lost:
            raise fd_socket.Closed
        stem, key = self._keys[rank]
        self._live[rank] = None
        node.send(
            messages.StartKernel(
                rank=rank, stem=stem, key=key, parcel=bytes(map_private(parcel)), name=name, restart=restart
            )
        )

    def signal(self, ranks: Sequence[int], number: int, *, group: bool) -> None:
        for node, own in self._by_node(ranks):
            node.send(messages.SignalRanks(own, number, group))

    def free(self, ranks: Sequence[int]) -> None:
        for node, own in self._by_node(ranks):
            node.send(messages.FreeRanks(own))

    def drain(self, rank: int) -> None:
        """Do nothing: a host sends what a rank has written before the message that calls for this."""

    def pid(self, rank: int) -> int | None:  # noqa: ARG002  # on its own machine only
        return None

    def is_live(self, rank: int) -> bool:
        return rank in self._live

    def describe_end(self) -> str:
        lost = [node.name for node in self.nodes if node.is_lost]
        return self._job_end or f"{'node' if len(lost) == 1 else 'nodes'} {', '.join(lost)} did not answer"

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        threads = [threading.Thread(target=node.close, daemon=True) for node in self.nodes]
        for node, thread in zip(self.nodes, threads, strict=True):
            if node.link is not None and hasattr(self, "_loop"):
                self._loop.unwatch(node.link.fileno())
            thread.start()
        for thread in threads:
            thread.join()
        self._live.clear()
        self._cluster.close()

    # what a session also asks of nodes; callable from any thread

    def send_frames(self, rank: int, channel: str, frames: list[bytes]) -> None:
        """Send a signed message to a kernel."""
        self._by_rank[rank].send(messages.KernelFrames(rank, channel, frames))

    def send_parcel(self, token: str, ranks: Sequence[int], parcel: int | None) -> None:
        """Send the parcel of a request, once to each node."""
        data = None if parcel is None else bytes(map_private(parcel))
        for node, own in self._by_node(ranks):
            node.send(messages.SendParcel(token, own, data))

    def close_parcel(self, token: str) -> None:
        """Expect no answer to a request any more."""
        for node in self.nodes:
            node.send(messages.CloseParcel(token))

    def ask(self, about: str, ranks: Sequence[int], limit_s: float) -> dict[int, Any]:
        """Return what the nodes of `ranks` know `about` them ("stacks", "usage"); ranks without an answer are left out.

        Do not call it in the event loop's thread.
        """
        futures: list[Future[Any]] = []
        for node, own in self._by_node(ranks):
            future: Future[Any] = Future()
            number = next(self._numbers)
            with self._asking:
                self._asked[number] = node, future
            futures.append(future)
            node.send(messages.Ask(number, about, own))
            if node.is_lost:
                future.set_result({})
        found: dict[int, Any] = {}
        deadline_s = time.monotonic() + limit_s
        for future in futures:
            try:
                found.update(future.result(max(0.0, deadline_s - time.monotonic())))
            except FutureTimeoutError:  # its ranks are left out
                continue
        return found

    # events

    def _by_node(self, ranks: Sequence[int]) -> list[tuple[Node, tuple[int, ...]]]:
        owned = ((node, tuple(rank for rank in ranks if rank in node.placement.ranks)) for node in self.nodes)
        return [(node, own) for node, own in owned if own]

    def _on_link(self, node: Node) -> None:
        assert node.link is not None
        for message in node.link.take():
            self._take(node, message)
        if node.link.lost and not node.is_lost:
            self._lose(node, node.link.lost)

    def _take(self, node: Node, message: Any) -> None:
        if isinstance(message, (messages.KernelFrames, messages.ParcelAnswer)):
            self.relay(message)
        elif isinstance(message, messages.FileBlocks):
            self._write(node, message)
        elif isinstance(message, messages.Answer):
            with self._asking:
                _, future = self._asked.pop(message.number)
            if not future.done():
                future.set_result(message.value)
        elif isinstance(message, (job.Started, Wrote, Reported, Ended)):
            self._on_event(node, message)

    def _on_event(self, node: Node, event: SpawnerEvent) -> None:
        if isinstance(event, job.Started):
            self._live[event.rank] = event.pid
        elif isinstance(event, Reported) and isinstance(event.report, (Returned, Raised)):
            event = replace(event, report=replace(event.report, time_s=event.report.time_s - node.offset_s))
        elif isinstance(event, Ended) and event.reason == SERVER_GONE:
            if not node.is_lost:  # its host is about to end; a restart that comes first starts it again too
                self._lose(node, "has no rank server any more")
            return
        elif isinstance(event, Ended):
            self._live.pop(event.rank, None)
            if event.exited is not None:
                exited = replace(event.exited, time_s=event.exited.time_s - node.offset_s)
                event = replace(event, exited=exited)
        self._emit(event)

    def _lose(self, node: Node, why: str) -> None:
        """Report that a node is lost, and its ranks with it. If the job has ended, all nodes are lost."""
        node.is_lost = node.was_lost = True
        node.why_lost = why
        self._job_end = self._cluster.describe_job_end()
        lost = [node]
        for other in self.nodes if self._job_end else ():
            if not other.is_lost:
                other.is_lost = other.was_lost = True
                lost.append(other)
        for each in lost:
            self._forget(each)
        if node.node_rank == 0 and not self._job_end:
            gone = f"node {node.name}, which runs the session's store, {node.why_lost}"
            self._emit(Ended(job.STORE, None, f"{gone}: no process group can be formed any more; variables are kept"))

    def _forget(self, node: Node) -> None:
        """Expect nothing of a lost node any more, and report its ranks as ended."""
        assert node.link is not None
        self._loop.unwatch(node.link.fileno())
        with self._asking:
            waiting = [future for owner, future in self._asked.values() if owner is node]
        for future in waiting:
            if not future.done():
                future.set_result({})
        reason = f"was lost with node {node.name}, which {node.why_lost}"
        if self._job_end:
            reason = f"was lost: {self._job_end}"
        for rank in node.placement.ranks:
            if self._live.pop(rank, 0) != 0:
                self._emit(Ended(rank, None, reason))

    def _write(self, node: Node, change: messages.FileBlocks) -> None:
        """Bring the copy of a rank's file up to date."""
        assert self._mirror is not None
        path = self._mirror / change.name
        if change.is_new:
            path.unlink(missing_ok=True)  # a reader may have the earlier one open
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(fd).st_size != change.size:
                os.ftruncate(fd, change.size)
            for at, data in sorted(change.blocks.items(), reverse=True):  # the header, which counts, is written last
                os.pwrite(fd, data if at else _with_clock(change.name, data, node.offset_s), at)
        finally:
            os.close(fd)


def _with_clock(name: str, header: bytes, offset_s: float) -> bytes:
    """Return the first block of a ring or journal with the word that says what its clock is ahead of this one."""
    word = CLOCK_AHEAD_NS if name.endswith(".ring") else JOURNAL_CLOCK_AHEAD_NS
    return header[: word * 8] + struct.pack("=q", int(offset_s * 1e9)) + header[word * 8 + 8 :]


def _forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this machine that ranks on other machines get too."""
    read = import_time_variables(environ)
    more = {name: value for name, value in environ.items() if name.startswith(_FORWARDED)}
    return {name: value for name, value in {**read, **more}.items() if name not in _OF_A_MACHINE}


def _count(asked: int | str, node: Node) -> int:
    """Return how many ranks `asked` means on `node`."""
    if isinstance(asked, int):
        return asked
    if asked == "cpu":
        return node.hello.num_cores
    if asked == "gpu" and node.hello.num_gpus == 0:
        raise LaunchError("counting ranks", found=f"node {node.name} has no visible GPU", fix="Give a number of ranks")
    return max(1, node.hello.num_gpus)


def _check_versions(nodes: Sequence[Node]) -> None:
    """Raise LaunchError if a node has a different version of Python, torch or ddpilot than the first one."""
    first = nodes[0]
    for node in nodes[1:]:
        for name, number in first.hello.versions.items():
            if node.hello.versions.get(name) != number:
                raise LaunchError(
                    f"comparing nodes {first.name} and {node.name}",
                    found=f"{name} {number} on {first.name}, {node.hello.versions.get(name)} on {node.name}",
                    fix="Use one environment on all nodes, such as in a shared folder",
                )
