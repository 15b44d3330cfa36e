# SPDX-License-Identifier: Apache-2.0
"""`RankKernels`: the kernels of a session's ranks, from start to end, and exclusive access to them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from jupyter_client.session import new_id_bytes

from ddpilot.environments.nvml import count_accelerators
from ddpilot.environments.private_files import make_socket_folder
from ddpilot.errors import LaunchError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.rank_server.job import STORE
from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.spawning import Ended, Wrote
from ddpilot.module_names import RECORD_HOOK
from ddpilot.output.view import View
from ddpilot.record.hook import RING_DIR_VARIABLE
from ddpilot.session.apps import find_app, present_modules
from ddpilot.session.arguments import check_gpus
from ddpilot.session.kernels.cell_watch import WatchedRank
from ddpilot.session.kernels.event_router import Event, EventRouter, Interrupted, InterruptListener, KernelMessage, Turn
from ddpilot.session.kernels.io_thread import IOThread, RelayedChannels
from ddpilot.session.kernels.output import IdleOutput, NativeOutput
from ddpilot.session.kernels.processes import KernelProcesses
from ddpilot.session.kernels.sockets import Connection
from ddpilot.session.kernels.states import START_OVER, RankStates, describe_store_end
from ddpilot.session.nodes.cluster import make_cluster
from ddpilot.session.nodes.messages import KernelFrames, ParcelAnswer
from ddpilot.session.nodes.node_ranks import NodeRanks
from ddpilot.session.options import SessionOptions
from ddpilot.session.protocol.large_values import ParcelCall
from ddpilot.session.protocol.messages import REQUEST, KernelStart, Request, Scope, request_content
from ddpilot.user_files import CodeLine
from ddpilot.watch.companion import Watcher
from ddpilot.watch.snapshot.files import take_stacks


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


_END_LIMIT_S = 30.0
_TURN_END_S = 5.0
_START_LIMIT_S = 120.0
_SUBSCRIBE_S = 0.05
"""Seconds after its reply at which a kernel is asked again, if no iopub message of it was received."""


class RankKernels:
    """The kernels of all ranks.

    One caller at a time uses them (`turn`); between turns, their output is shown as it arrives.
    """

    def __init__(self, options: SessionOptions, view: View) -> None:
        self.options = options
        self.view = view
        self.generation = 0
        """Number of times the group has been rebuilt."""
        self.lost: tuple[str, ...] = ()
        """Descriptions of objects that were lost with process groups that were rebuilt."""
        self.is_closed = False
        self._owner_pid = os.getpid()
        self._pids: dict[int, int] = {}
        self.watcher: Watcher | None = None
        """Watches the ranks from outside; None if the session was started without `watch`."""
        self._folder: Path | None = None
        try:
            self.processes = processes = KernelProcesses(
                self._launch_options(), self._kernel_start, make_cluster(options, view.note)
            )
            self._incarnations = [0] * processes.world_size
            if options.watch:
                stacks = self.processes.take_stacks if processes.nodes is not None else None
                self.watcher = Watcher(options, "the session", processes.world_size, stacks=stacks)
            self.states = RankStates(processes.world_size)
            self.idle_output = IdleOutput(view, processes, self.states, respawns=options.respawn)
            self._router = EventRouter(self.idle_output.show, self.states.set_all_idle)
            self._native_output = NativeOutput(self._router)
            self.io_thread = IOThread(self._deliver, self._tick, self._on_broken)
            self._relayed_parcels: WeakValueDictionary[str, RelayedParcels] = WeakValueDictionary()
            if processes.nodes is not None:
                processes.nodes.relay = self._relay
        except BaseException:
            self._remove_folders()
            raise
        atexit.register(self.close)  # runs before the rank servers are stopped, which would kill the ranks

    @property
    def world_size(self) -> int:
        """Number of ranks, including dead ones."""
        return self.processes.world_size

    @property
    def folder(self) -> Path:
        """The session's private folder.

        Created at first use: by then a rank server is running, which removes it even if this process is killed.
        """
        if self._folder is None:
            self._folder = make_socket_folder()
        return self._folder

    @property
    def ring_folder(self) -> Path:
        """The folder of the ranks' flight rings."""
        return (self.watcher.folder if self.watcher is not None else None) or self.folder

    def _launch_options(self) -> LaunchOptions:
        given = self.options.launch_options()
        if not self.options.is_remote:
            check_gpus(self.options.gpus, count_accelerators({**os.environ, **self.options.env}))
        preload = tuple(name for app in self.options.apps for name in present_modules(find_app(app)))
        return replace(given, preload=(*given.preload, *preload))

    def _remove_folders(self) -> None:
        if self.watcher is not None:
            self.watcher.end(is_clean=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def pid(self, rank: int) -> int | None:
        """Return the process id of the rank, also if the process has ended; None if it never had one."""
        pid = self.processes.pid(rank)
        if pid is not None:
            self._pids[rank] = pid
        return self._pids.get(rank)

    def _kernel_start(self) -> KernelStart:
        options = self.options
        return KernelStart(
            folder=Path() if options.is_remote else self.folder,  # a node has a folder of its own
            incarnations=tuple(self._incarnations),
            apps=options.apps,
            seed=options.seed,
            keep_cache=options.keep_cache,
            verbose=options.verbose,
        )

    def send_parcels(self, token: str, ranks: Sequence[int], parcel: int | None) -> ParcelCalls:
        """Send the parcel of a request (None: it has none) to `ranks`."""
        if self.processes.nodes is not None:
            calls = RelayedParcels(self.processes.nodes, token)
            self._relayed_parcels[token] = calls
            self.processes.nodes.send_parcel(token, ranks, parcel)
            return calls
        start = self._kernel_start()
        return LocalParcels({rank: start.parcel_socket(rank) for rank in ranks}, token, parcel)

    def _relay(self, message: KernelFrames | ParcelAnswer) -> None:
        """Take a message of a kernel on a different machine."""
        if isinstance(message, KernelFrames):
            self.io_thread.receive_frames(message.rank, message.channel, message.frames)
        elif (calls := self._relayed_parcels.get(message.token)) is not None:
            calls.put(message)

    # lifecycle

    def start(self) -> None:
        """Start all ranks and wait until they reply. If that fails, end them all and release all resources."""
        try:
            self.processes.attach(self.io_thread)
            # Record in any case: the rings show whether a failure has left the group intact.
            hooks = (self.watcher.hooks if self.watcher is not None else ()) or (RECORD_HOOK,)
            self.processes.add_hooks(hooks, {RING_DIR_VARIABLE: str(self.ring_folder)})
            self.io_thread.start()
            with self.turn("starting the session") as turn:
                self.start_processes(range(self.world_size), turn.events)
            if self.watcher is not None:
                seen = [WatchedRank(rank, self.states, self.pid) for rank in range(self.world_size)]
                self.watcher.begin(seen, is_paused=True)
        except BaseException:
            with InterruptListener(queue.SimpleQueue()):  # a second interrupt must not cut this clean-up short
                self.close()
            raise

    def start_processes(self, ranks: Sequence[int], events: queue.SimpleQueue[Event]) -> None:
        """Start the processes of `ranks`, which have none, and wait until their kernels reply."""
        for rank in ranks:
            self._native_output.tail.forget(rank)
            connect = self._prepare_kernel(rank)
            try:
                self.io_thread.call(functools.partial(self._start_one, rank, connect))
            except fd_socket.Closed as error:
                found = self.processes.describe_end()
                raise LaunchError(f"starting rank {rank}", found=found, fix=START_OVER, rank=rank) from error
        await_ready(self.io_thread, ranks, events, self._describe_end)

    def _prepare_kernel(self, rank: int) -> Callable[[], None]:
        """Prepare for a kernel of `rank`; return what connects to it, to be called in the I/O thread."""
        start, key = self._kernel_start(), new_id_bytes()
        nodes = self.processes.nodes
        if nodes is not None:
            nodes.prepare_kernel(rank, start.stem(rank), key)
            channels = RelayedChannels(rank, key, nodes.send_frames, nodes.node_of(rank).offset_s)
            return functools.partial(self.io_thread.connect_relayed, channels)
        connection = Connection(str(self.folder / start.stem(rank)), key)
        connection.write(start.connection_file(rank))
        return functools.partial(self.io_thread.connect, rank, connection)

    def _start_one(self, rank: int, connect: Callable[[], None]) -> None:
        connect()
        self.processes.start(rank, self.generation)
        self.states.note_start(rank)

    def _describe_end(self, ended: Ended) -> str | None:
        """Describe the end of a starting rank; return None if the rank is alive, as an earlier process of it ended."""
        if ended.rank not in self.states.dead:
            return None
        lines = "\n".join(self.last_lines(ended.rank)[-20:])
        return self.states.dead[ended.rank] + (f"; it wrote:\n{lines}" if lines else "")

    def end_process(self, rank: int, events: queue.SimpleQueue[Event]) -> None:
        """Kill the process of `rank`, if it is alive, and prepare for a new one."""
        interrupts: list[Event] = []
        if rank not in self.states.dead:
            self.signal((rank,), signal.SIGKILL)
            while rank not in self.states.dead:
                event = events.get(timeout=_END_LIMIT_S)
                interrupts += [event] if isinstance(event, Interrupted) else []
        self._incarnations[rank] += 1
        for interrupt in interrupts:
            events.put(interrupt)  # handled by the next reader of the queue

    def end_turn(self) -> None:
        """End the turn of a different thread with an error: the session is being stopped."""
        self._router.end_turn(Ended(STORE, None, "the session was stopped while it ran"), _TURN_END_S)

    def close(self) -> None:
        """End every rank and release all resources.

        A second call, or a call in a fork of this process, does nothing.
        """
        if self.is_closed or os.getpid() != self._owner_pid:
            return
        self.is_closed = self.idle_output.is_ending = True
        self.end_turn()
        atexit.unregister(self.close)
        try:
            try:
                self.io_thread.call(self.processes.close)
            except RuntimeError:  # the I/O thread has ended, or was never started
                self.processes.close()
        finally:
            self.io_thread.stop()
            self._remove_folders()

    # events

    def turn(self, did: str) -> AbstractContextManager[Turn]:
        """Take exclusive use of the ranks, as `EventRouter.turn`. Raises LaunchError if the session was stopped."""
        if self.is_closed:
            raise LaunchError(did, found="the session was stopped", fix="Start a new one")
        if self.io_thread.is_broken:
            raise LaunchError(did, found=self.states.store_end, fix=START_OVER)
        return self._router.turn(did)

    def interrupt(self) -> bool:
        """Interrupt what is running, as the interrupt button does; return False if nothing is.

        Call it from a different thread.
        """
        with self._router.lock:
            if not self._router.is_taken or not self.states.busy:
                return False
            self._router.put(Interrupted())
            return True

    def read_stacks(self, ranks: Sequence[int]) -> dict[int, tuple[CodeLine, ...]]:
        """Return the frames of each rank's main thread, innermost first, also if the thread is stuck in C++.

        Ranks that do not respond are left out.
        """
        if self.processes.nodes is not None:
            return {rank: stack.frames for rank, stack in self.processes.take_stacks(ranks).items()}
        pids = {rank: pid for rank in ranks if (pid := self.processes.pid(rank)) is not None}
        return {rank: stack.frames for rank, stack in take_stacks(self.ring_folder, pids).items()}

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """Return the last lines that the rank wrote, bypassing its kernel."""
        return self._native_output.tail.last_lines(rank)

    def hide_torch_logs(self, ranks: Iterable[int]) -> None:
        """Remove torch's log lines from the output of `ranks`, which are being freed, until `show_torch_logs`."""
        with self._router.lock:
            self._native_output.hide_torch_logs(ranks)

    def show_torch_logs(self) -> None:
        """Stop removing torch's log lines: the group was rebuilt."""
        with self._router.lock:
            self._native_output.show_torch_logs(range(self.world_size))

    # sending

    def scope(self, ranks: Sequence[int]) -> Scope:
        """Return the scope of a cell or request on `ranks`."""
        is_everywhere = len(ranks) == self.world_size
        return Scope(ranks=() if is_everywhere else tuple(ranks), blocked=self.states.blocked)

    def request(self, request: Request, ranks: Sequence[int]) -> dict[int, str]:
        """Send a request to `ranks`. Return the message ids by rank."""
        return self.io_thread.send(ranks, "shell", REQUEST, request_content(request, self.scope(ranks)))

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to the processes of `ranks`."""
        if ranks:
            self.io_thread.post(lambda: self.processes.signal(ranks, number))

    def _deliver(self, event: Event) -> None:
        with self._router.lock:
            if (
                isinstance(event, KernelMessage)
                and event.kind == "status"
                and event.content["execution_state"] == "idle"
            ):
                # Bytes that bypassed Python arrive through pipes and belong to this cell.
                self.processes.drain(event.rank)
            if isinstance(event, Wrote):
                self._native_output.take(event)
                return
            if isinstance(event, Ended):
                self._on_ended(event)
            self._router.put(event)

    def _on_ended(self, ended: Ended) -> None:
        if ended.rank == STORE:
            self.states.store_end = describe_store_end(ended)
            return
        self._native_output.show_torch_logs([ended.rank])
        self.io_thread.disconnect(ended.rank)
        self.states.note_end(ended, self.last_lines(ended.rank))

    def note(self, text: str) -> None:
        """Show a message of ddpilot outside a cell. Dropped while a cell runs."""
        with self._router.lock:
            if not self._router.is_taken:
                self.view.note(text)

    def _tick(self, now: float) -> float | None:
        with self._router.lock:
            if self._router.is_taken:
                return None
            self.view.show(now)
            return self.view.next_due_s()

    def _on_broken(self, error: BaseException) -> None:
        self._deliver(Ended(STORE, None, f"ddpilot's own thread failed: {error!r}"))

    def send_comm(
        self, rank: int, kind: str, content: dict[str, Any], metadata: dict[str, Any], buffers: list[bytes]
    ) -> None:
        """Send a comm message from the notebook's widgets to a rank."""
        if rank not in self.states.dead and not self.is_closed:
            self.io_thread.send([rank], "shell", kind, content, metadata, buffers=buffers)


def await_ready(
    io_thread: IOThread,
    ranks: Sequence[int],
    events: queue.SimpleQueue[Event],
    describe_end: Callable[[Ended], str | None],
) -> None:
    """Request kernel info from each of `ranks` until it has replied and one of its iopub messages was received.

    Raises LaunchError if a rank ends or does not reply within two minutes, and KeyboardInterrupt after an interrupt.
    `describe_end` describes the end of a rank; it returns None for the end of an earlier process. What the ranks write
    is put back into `events`.
    """
    written = []
    waiting, subscribed = set(ranks), set[int]()
    did = f"starting {render_ranks(sorted(waiting))}"
    ask_again_s = dict.fromkeys(waiting, 0.0)
    limit_s = time.monotonic() + _START_LIMIT_S
    while waiting:
        now = time.monotonic()
        if now > limit_s:
            raise LaunchError(
                did,
                found=f"{render_ranks(sorted(waiting))} did not answer in {_START_LIMIT_S:g} s",
                fix="Ask for fewer ranks, or see whether the machine is out of memory",
            )
        for rank in [rank for rank in waiting if ask_again_s[rank] <= now]:
            io_thread.send([rank], "shell", "kernel_info_request", {})
            ask_again_s[rank] = limit_s
        with contextlib.suppress(queue.Empty):
            event = events.get(timeout=max(0.001, min([limit_s, *ask_again_s.values()]) - now))
            if isinstance(event, KernelMessage) and event.channel == "iopub":
                subscribed.add(event.rank)
            elif isinstance(event, KernelMessage) and event.channel == "shell" and event.rank in waiting:
                ask_again_s[event.rank] = time.monotonic() + _SUBSCRIBE_S
            elif isinstance(event, Ended) and event.rank in waiting:
                if (reason := describe_end(event)) is not None:
                    raise LaunchError(did, found=f"rank {event.rank} ended: {reason}", rank=event.rank)
            elif isinstance(event, Interrupted):
                raise KeyboardInterrupt
            elif isinstance(event, Wrote):
                written.append(event)
        waiting -= {rank for rank in waiting if rank in subscribed and 0 < ask_again_s[rank] < limit_s}
    for event in written:
        events.put(event)
