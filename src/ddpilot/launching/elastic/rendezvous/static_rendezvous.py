# SPDX-License-Identifier: Apache-2.0
"""Static rendezvous: node 0 hosts the store, the other nodes connect to it, and missing nodes are named.

torch's own "static" handler, which this one extends, waits in one C++ call, which shows no progress, does not name
missing nodes, and cannot be interrupted.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ddpilot.errors import DdpilotError, LaunchError, RankError, RendezvousError
from ddpilot.group.address import WaitNotices, listen, wait_for_port
from ddpilot.group.store import host_on
from ddpilot.launching.elastic.rendezvous.heartbeat import Heartbeat, LivenessCheck, Standstill, silent_nodes
from ddpilot.launching.elastic.rendezvous.network import Endpoint
from ddpilot.launching.elastic.rendezvous.node_state import (
    DONE,
    ENDED,
    READY,
    NodeState,
    NodesView,
    StoreMailbox,
    asks_for_requeue,
    check_agreement,
    decode_state,
    render_nodes,
    unpack_error,
    with_failure,
)

_STORE_TIMEOUT_S = 60.0
_PAUSE_S = 0.05
_LEAVE_LIMIT_S = 5.0


class StaticRendezvousHandler(StaticTCPRendezvous):
    """The rendezvous of this node. `note` shows a notice; `timeout_s`, `node_timeout_s`: as in `RunOptions`."""

    def __init__(
        self,
        endpoint: Endpoint,
        me: NodeState,
        *,
        run_id: str,
        timeout_s: float,
        node_timeout_s: float,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(endpoint.addr, endpoint.port, me.node_rank, me.nnodes, run_id, int(timeout_s))
        self._endpoint = endpoint
        self._me = me
        self._timeout_s = timeout_s
        self._note = note
        self._standstill = Standstill()
        self._liveness = LivenessCheck(node_timeout_s, note, self._standstill)
        self._server: TCPStore | None = None
        self._ranks_server: TCPStore | None = None
        self._heartbeat: Heartbeat | None = None
        self._attempt = -1

    def shutdown(self) -> bool:
        self.close()
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes are ready for the next attempt. Raises RendezvousError with the missing nodes."""
        self._attempt += 1
        attempt, port = self._attempt, self._endpoint.port
        if self._store is None:
            self._store = self._open()
        elif self._server is not None:
            port = self._open_for_ranks()
        if self._heartbeat is not None:
            self._heartbeat.update(lambda me: replace(me, attempt=attempt, phase=READY, ranks_port=port))
            port = self._wait_for_all(self._heartbeat).states[0].ranks_port
        store = PrefixStore(f"attempt{attempt}", self._store)
        where = RendezvousStoreInfo(self._endpoint.addr, port)
        return RendezvousInfo(store, self._me.node_rank, self._me.nnodes, where)

    def open_mailbox(self) -> StoreMailbox | None:
        """The mailbox for messages between nodes in this attempt; None if there is only one node."""
        return None if self._heartbeat is None else self._heartbeat.open_mailbox(self._attempt)

    def _failures_elsewhere(self) -> list[Mapping[str, Any]]:
        """The failures that other nodes have reported in this attempt, packed."""
        states = () if self._heartbeat is None else self._heartbeat.view().states.values()
        others = [each for each in states if each.node_rank != self._me.node_rank]
        return [each.failure for each in others if each.failure and each.failed_attempt >= self._attempt]

    def failure_elsewhere(self, how_here: str) -> RankError | LaunchError | None:
        """The failure that a different node reported in this attempt, or None. `how_here`: how the ranks here ended."""
        failures = self._failures_elsewhere()
        return unpack_error(failures[0], how_here) if failures else None

    @property
    def is_requeue_elsewhere(self) -> bool:
        """True if the ranks of a different node exited in this attempt with the code that asks for a requeue."""
        return any(map(asks_for_requeue, self._failures_elsewhere()))

    def check(self) -> None:
        """Show a notice for nodes that have been silent for long. Raises RendezvousError after `node_timeout_s`."""
        if self._heartbeat is not None:
            self._liveness.look(self._heartbeat.view())

    def silent_nodes(self, limit_s: float) -> list[NodeState]:
        """Nodes that have sent no heartbeat for `limit_s` seconds and have not left."""
        return [] if self._heartbeat is None else silent_nodes(self._heartbeat.view(), limit_s)

    def report_failure(self, error: DdpilotError) -> None:
        """Report to the other nodes why this node's ranks ended."""
        if self._heartbeat is not None:
            self._heartbeat.update(lambda me: with_failure(me, error))
            self._heartbeat.flush(_LEAVE_LIMIT_S)

    def wait_until_all_are_done(self, failure: Callable[[], bool]) -> None:
        """Keep the store running while other nodes' ranks run. Returns early if `failure()` is True."""
        if self._heartbeat is None:
            return
        self._heartbeat.update(lambda me: replace(me, phase=DONE))
        notices = WaitNotices(self._note)
        while not failure():
            view = self._heartbeat.view()
            running = [node for node, state in view.states.items() if state.phase == READY]
            if not running:
                return
            self.check()
            nodes = render_nodes(running, view.states)
            notices.show_if_due(f"the ranks here have finished; waited {notices.waited_s:.0f} s for {nodes}")
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Report that this node leaves. Node 0, which hosts the store, waits at most 5 s for them to leave."""
        if self._heartbeat is None:
            return
        heartbeat, self._heartbeat = self._heartbeat, None
        heartbeat.update(lambda me: replace(me, phase=ENDED))
        heartbeat.flush(_LEAVE_LIMIT_S)
        deadline_s = time.monotonic() + _LEAVE_LIMIT_S
        while self._me.node_rank == 0 and time.monotonic() < deadline_s:
            view = heartbeat.view()
            if all(state.phase == ENDED or view.silent_s.get(node, 0.0) > 2.0 for node, state in view.states.items()):
                break
            time.sleep(_PAUSE_S)
        heartbeat.stop()
        self._standstill.stop()

    # opening

    def _open(self) -> Store:
        """Host the store or connect to it, and start to exchange heartbeats."""
        listener = self._endpoint.listener
        if listener is not None:
            self._server = self._host(listener, self._endpoint.port)
        else:
            self._wait_for_node_0()
        base = self._server if self._server is not None else self._connect(self._endpoint.port)
        if self._me.nnodes > 1:
            self._heartbeat = Heartbeat(self._join, self._me)
            self._standstill.start()
        return PrefixStore(f"ddpilot-run/{self.run_id}", base)

    def _open_for_ranks(self) -> int:
        """Start a new store for restarted ranks and return its port: the old one has addresses of dead ranks."""
        listener = listen(self._endpoint.addr, 0)
        assert listener is not None
        port: int = listener.getsockname()[1]
        self._ranks_server = self._host(listener, port)
        return port

    def _host(self, listener: socket.socket, port: int) -> TCPStore:
        return host_on(listener.detach(), functools.partial(self._connect, port, is_master=True))

    def _connect(self, port: int, *, is_master: bool = False, **more: object) -> TCPStore:
        host = self._endpoint.addr if self._me.node_rank else "127.0.0.1"
        return TCPStore(
            host,
            port,
            is_master=is_master,
            timeout=timedelta(seconds=_STORE_TIMEOUT_S),
            wait_for_workers=False,
            **more,  # type: ignore[arg-type]
        )

    def _join(self) -> Store:
        """Connect for heartbeats. Raises RendezvousError if a different agent has this node's rank."""
        store = PrefixStore(f"ddpilot-run/{self.run_id}", self._connect(self._endpoint.port))
        number = self._me.node_rank
        if store.add(f"taken/{number}", 1) > 1:
            key = f"node/{number}"
            who = "a different process"
            if store.check([key]):
                other = decode_state(store.get(key))
                who = f"{other.host}, pid {other.pid}"
            raise RendezvousError(
                f"joining as node {number}",
                found=f"{who} is already node {number} at {self._where}",
                fix="Give each node its own --node-rank; if that job has ended, use a different --master-port",
            )
        return store

    @property
    def _where(self) -> str:
        return f"{self._endpoint.addr}:{self._endpoint.port}"

    def _wait_for_node_0(self) -> None:
        of = f"node 0 of {self._me.nnodes} nodes"
        try:
            wait_for_port(self._endpoint.addr, self._endpoint.port, self._timeout_s, self._note, of=of)
        except RendezvousError as error:
            error.fix = (
                "Check that `ddpilot run --node-rank 0` runs on that machine with the same --master-addr and "
                "--master-port, and that no firewall blocks the port; --rdzv-timeout is the time to wait"
            )
            raise

    def _wait_for_all(self, heartbeat: Heartbeat) -> NodesView:
        notices = WaitNotices(self._note)
        while True:
            view = heartbeat.view()
            here = {node for node, state in view.states.items() if state.attempt >= self._attempt}
            missing = set(range(self._me.nnodes)) - here
            self._refuse(view)
            if not missing:
                return view
            waited_s = notices.waited_s
            absent, joined = render_nodes(missing, view.states), render_nodes(here, view.states)
            if waited_s >= self._timeout_s:
                raise RendezvousError(
                    f"waiting for {self._me.nnodes} nodes at {self._where}",
                    found=f"{absent} did not join within {waited_s:.0f} s; joined: {joined}",
                    fix="Check the output of `ddpilot run` on those nodes: was it started with this --master-addr and "
                    "--master-port and its own --node-rank? --rdzv-timeout is the time to wait",
                )
            notices.show_if_due(
                f"waiting for {absent} of {self._me.nnodes} nodes at {self._where}, "
                f"for {waited_s:.0f} s of {self._timeout_s:g} s; joined: {joined}"
            )
            time.sleep(_PAUSE_S)

    def _refuse(self, view: NodesView) -> None:
        check_agreement(self._me, view.states)
        for state in view.states.values():
            if state.node_rank != self._me.node_rank and state.phase == ENDED and state.failure:
                raise unpack_error(state.failure, "")
        self._liveness.look(view)
