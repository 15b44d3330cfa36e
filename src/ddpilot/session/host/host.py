# SPDX-License-Identifier: Apache-2.0
"""`Host`: starts the ranks of one node for a parent on a different machine, and sends what changes in their files."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import platform
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ddpilot.environments.nvml import count_accelerators
from ddpilot.environments.private_files import make_socket_folder
from ddpilot.environments.variables import is_loopback
from ddpilot.errors import LaunchError
from ddpilot.launching.elastic.rendezvous.network import Endpoint, interface_towards, up_interfaces
from ddpilot.launching.rank_environment import count_cores, default_variables
from ddpilot.launching.rank_server.client import stop_servers
from ddpilot.launching.rank_server.job import Started
from ddpilot.launching.shipping.memory_file import MemoryWriter
from ddpilot.launching.spawning import Ended, ForkedRanks, Reported, SpawnerEvent
from ddpilot.record.flight_ring import layout
from ddpilot.record.hook import RING_DIR_VARIABLE, journal_path, ring_path
from ddpilot.session.host.relay import HostLoop, KernelRelay
from ddpilot.session.nodes import messages
from ddpilot.session.nodes.link import Link
from ddpilot.session.nodes.messages import FileBlocks
from ddpilot.session.status import collect_usage
from ddpilot.watch.snapshot.files import take_stacks

_PIECE_BYTES = 1 << 16
_BLOCK_BYTES = 4096
_CLOCK_WORDS = slice(layout.HEARTBEAT_NS * 8, layout.HEARTBEAT_NS * 8 + 8)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 1.0
"""Seconds between two comparisons of a file whose header does not change, first and longest: ends of collectives are
recorded late. Comparing is the larger part of what a host costs while its ranks are idle."""


class WatchedFile:
    """A file of a rank, mapped, and what the parent has of it. Raises OSError or ValueError if there is none yet.

    Ranks write a file under a different name before they rename it, so its size does not change. While it is mapped,
    the number of its inode is not used again.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb", buffering=0) as file:
            self.inode = os.fstat(file.fileno()).st_ino
            self._current = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._current)
        ends = (*range(_BLOCK_BYTES, self.size, _PIECE_BYTES), self.size)
        self._copy = [bytearray(end - start) for start, end in itertools.pairwise((0, *ends))]
        """The parent's copy, in pieces, of which the first is the one that changes with each heartbeat."""
        self._header = b""
        self._is_settled = False
        """True if the file was compared at the end of a cell and its header has not changed since."""
        self._compared_s = 0.0
        self._wait_s = _FIRST_WAIT_S

    def is_due(self, now: float, *, is_end: bool) -> bool:
        """Return True if the file has to be compared now. `is_end`: at the end of a cell, or of the rank."""
        header = bytearray(self._current[: layout.ABOUT_AT])
        header[_CLOCK_WORDS] = bytes(8)
        if header != self._header:
            self._header, self._is_settled, self._wait_s = bytes(header), is_end, _FIRST_WAIT_S
        elif is_end and not self._is_settled:
            self._is_settled = True
        elif now >= self._compared_s + self._wait_s:
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        else:
            return False
        self._compared_s = now
        return True

    def take_changes(self) -> dict[int, bytes]:
        """Return the blocks that differ from the parent's copy, by offset, and update the copy."""
        blocks: dict[int, bytes] = {}
        at = 0
        with memoryview(self._current) as current:
            for piece in self._copy:
                if piece != current[at : at + len(piece)]:
                    data = bytes(current[at : at + len(piece)])  # the rank may be writing
                    for start in range(0, len(data), _BLOCK_BYTES):
                        block = data[start : start + _BLOCK_BYTES]
                        if block != piece[start : start + _BLOCK_BYTES]:
                            blocks[at + start] = block
                    piece[:] = data
                at += len(piece)
        return blocks

    def close(self) -> None:
        """Unmap the file."""
        self._current.close()


class FileWatch:
    """Passes changed blocks of the files of ranks in `folder` to `send`, so that the parent has a copy of each file."""

    def __init__(self, folder: Path, send: Callable[[FileBlocks], None]) -> None:
        self._folder = folder
        self._send = send
        self._files: dict[Path, WatchedFile] = {}

    def look(self, ranks: Iterable[int], *, is_end: bool = False) -> None:
        """Send what has changed in the files of `ranks`. `is_end`: the end of a cell or a rank is reported next."""
        for rank in ranks:
            for path in (ring_path(self._folder, rank), journal_path(self._folder, rank)):
                with contextlib.suppress(OSError, ValueError):  # not created yet, or being created
                    self._look_at(path, is_end)

    def _look_at(self, path: Path, is_end: bool) -> None:
        file = self._files.get(path)
        is_new = file is None or file.inode != os.stat(path).st_ino
        if file is None or is_new:
            previous, file = file, WatchedFile(path)
            self._files[path] = file
            if previous is not None:
                previous.close()
        if file.is_due(time.monotonic(), is_end=is_end):
            blocks = file.take_changes()
            if blocks or is_new:
                self._send(FileBlocks(path.name, file.size, blocks, is_new))


_ANYWHERE = ("203.0.113.1", 9)
"""An address that is reserved for documentation: reached by the default route, if there is one."""

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def find_master_address(reached_at: str) -> str:
    """Return this node's address on the default route; without one, the address at which the parent reached it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ANYWHERE)  # a datagram socket: no packet is sent
        address = str(probe.getsockname()[0])
        if not is_loopback(address):
            return address
    return reached_at or "127.0.0.1"


def ssh_address() -> str:
    """Return the address at which ssh reached this node; "" if this process was not started by ssh."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""


def open_store(address: str) -> tuple[socket.socket, int]:
    """Return a socket that listens for the store on `address`, and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=2048)
    return listener, int(listener.getsockname()[1])


def interface_variables(address: str, port: int) -> dict[str, str]:
    """Return the variables with the interface that routes to the store; empty if it is unknown."""
    if is_loopback(address):
        defaults = default_variables()
        return {name: defaults[name] for name in _INTERFACES}
    interface = interface_towards(Endpoint(addr=address, port=port), up_interfaces())
    return {} if interface is None else dict.fromkeys(_INTERFACES, interface)


_LOOK_S = 0.1
_FULL_BYTES = 64 << 20


def _find_step() -> str:
    job_id, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    return f"{job_id}.{step}" if job_id and step else ""


class Host:
    """The ranks of this node. `directory`: the parent's working directory."""

    def __init__(self, link: Link, node_rank: int, reached_at: str, directory: str, num_nodes: int) -> None:
        self._link = link
        self._folder: Path | None = None
        self._ranks: ForkedRanks | None = None
        self._notes: list[str] = []
        self._store: socket.socket | int = 0
        self._loop = HostLoop(self._tick, _LOOK_S, lambda: link.num_unsent_bytes > _FULL_BYTES)
        self._loop.watch(link.fileno(), self._on_link, always=True)
        address, port = "", 0
        if node_rank == 0:
            address = find_master_address(reached_at) if num_nodes > 1 else "127.0.0.1"
            self._store, port = open_store(address)
        link.send(
            messages.HostHello(
                node=os.environ.get("SLURMD_NODENAME") or platform.node(),
                step=_find_step(),
                versions={
                    "Python": platform.python_version(),
                    "torch": version("torch"),
                    "ddpilot": version("ddpilot"),
                },
                num_gpus=count_accelerators(os.environ),
                num_cores=count_cores(),
                has_directory=os.path.isdir(directory),
                master_addr=address,
                master_port=port,
            )
        )
        if os.path.isdir(directory):
            os.chdir(directory)

    def run(self) -> None:
        """Serve the parent until the connection ends."""
        try:
            self._loop.run()
        finally:
            self.close()

    def close(self) -> None:
        """End all ranks and remove the session's folder."""
        if self._ranks is not None:
            self._relay.close(self._placement.ranks)
            self._ranks.close()
            self._ranks = None
        stop_servers()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._link.close()

    def _on_link(self) -> None:
        for message in self._link.take():
            self._handle(message)
        if self._link.lost:
            self._loop.stop()

    def _tick(self) -> None:
        if self._link.lost or (self._ranks is not None and not self._ranks.can_start):
            self._loop.stop()  # without its rank server the node counts as lost, and is started again for a restart
        elif self._ranks is not None:
            self._files.look([rank for rank in self._placement.ranks if self._ranks.pid(rank) is not None])

    def _handle(self, message: Any) -> None:
        if isinstance(message, messages.KernelFrames):
            self._relay.send(message)
        elif isinstance(message, messages.SendParcel):
            self._relay.send_parcel(message)
        elif isinstance(message, messages.CloseParcel):
            self._relay.close_parcel(message.token)
        elif isinstance(message, messages.Ask):
            threading.Thread(target=self._answer, args=(message,), daemon=True).start()
        elif isinstance(message, messages.Clock):
            self._link.send(replace(message, answered_s=time.monotonic()))
        elif isinstance(message, messages.Prepare):
            self._prepare(message)
        elif isinstance(message, messages.EndHost):
            self._loop.stop()
        elif self._ranks is not None:
            self._handle_ranks(message, self._ranks)

    def _handle_ranks(self, message: Any, ranks: ForkedRanks) -> None:
        if isinstance(message, messages.StartKernel):
            self._start(message, ranks)
        elif isinstance(message, messages.SignalRanks):
            ranks.signal(message.ranks, message.number, group=message.group)
        elif isinstance(message, messages.FreeRanks):
            ranks.free(message.ranks)
        elif isinstance(message, messages.AddHooks):
            ranks.add_hooks(message.hooks, {**message.variables, RING_DIR_VARIABLE: str(self._folder)})

    def _prepare(self, request: messages.Prepare) -> None:
        sys.argv[:] = request.argv
        self._placement = request.placement
        try:
            folder = self._folder = make_socket_folder()
            environ = self._environ(request)
            store = request.master_port if request.placement.node_rank else self._store
            ranks = ForkedRanks(
                request.options,
                environ,
                request.placement.world_size,
                self._notes.append,
                {},
                str(folder),
                placement=request.placement,
                store=store,
                launch_id=request.launch_id,
            )
            ranks.attach(self._loop, self._emit)
        except LaunchError as error:
            self._link.send(messages.NotPrepared(error.did, error.found, error.fix))
            return
        except OSError as error:
            self._link.send(messages.NotPrepared("preparing the node", str(error), ""))
            return
        self._files = FileWatch(folder, self._link.send)
        self._relay = KernelRelay(self._loop, folder, self._link.send, self._before_message)
        self._ranks = ranks
        self._link.send(messages.Prepared(folder=str(folder), notes=tuple(self._notes)))

    def _environ(self, request: messages.Prepare) -> Mapping[str, str]:
        placement = request.placement
        interfaces = interface_variables(placement.master_addr, request.master_port)
        return {**request.defaults, **interfaces, **os.environ, **request.variables}

    def _start(self, request: messages.StartKernel, ranks: ForkedRanks) -> None:
        self._relay.prepare(request.rank, request.stem, request.key)
        writer = MemoryWriter("ddpilot-kernel")
        writer.write(request.parcel)
        parcel = writer.seal()
        try:
            ranks.start(request.rank, parcel, request.name, sources={}, restart=request.restart)
        finally:
            os.close(parcel)

    def _emit(self, event: SpawnerEvent) -> None:
        if isinstance(event, Started):
            self._relay.connect(event.rank)
        elif isinstance(event, Ended) and event.rank >= 0:
            self._relay.disconnect(event.rank)
            self._files.look([event.rank], is_end=True)
        elif isinstance(event, Reported) and event.parcel is not None:
            event = replace(event, parcel=None)  # a kernel returns nothing that the parent reads
        self._link.send(event)

    def _before_message(self, rank: int, channel: str) -> None:
        """Pass on what belongs before the messages of a kernel that have arrived."""
        assert self._ranks is not None
        if channel == "iopub" and self._ranks.is_live(rank):
            self._ranks.drain(rank)  # bytes that bypassed Python belong to the cell whose end is reported next
        elif channel in ("shell", "control"):
            self._files.look([rank], is_end=True)

    def _answer(self, request: messages.Ask) -> None:
        ranks = self._ranks
        pids = {rank: pid for rank in request.ranks if ranks is not None and (pid := ranks.pid(rank)) is not None}
        value: dict[int, Any] = {}
        if request.about == "stacks" and self._folder is not None:
            value = dict(take_stacks(self._folder, pids))
        elif request.about == "usage":
            by_pid = collect_usage(pids.values())
            value = {rank: {"pid": pid, **by_pid.get(pid, {})} for rank, pid in pids.items()}
        self._link.send(messages.Answer(request.number, value))
