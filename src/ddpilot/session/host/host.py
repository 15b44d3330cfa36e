# SPDX-License-Identifier: Apache-2.0
"""`Host`: starts the ranks of one node for a parent on a different machine, and ends with the connection to it."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ddpilot.environments.nvml import count_accelerators
from ddpilot.environments.private_files import make_socket_folder
from ddpilot.errors import LaunchError
from ddpilot.launching.rank_environment import count_cores
from ddpilot.launching.rank_server.client import stop_servers
from ddpilot.launching.rank_server.job import Started
from ddpilot.launching.shipping.memory_file import MemoryWriter
from ddpilot.launching.spawning import Ended, ForkedRanks, Reported, SpawnerEvent
from ddpilot.record.hook import RING_DIR_VARIABLE
from ddpilot.session.host import network
from ddpilot.session.host.files import FileWatch
from ddpilot.session.host.loop import HostLoop
from ddpilot.session.host.relay import KernelRelay
from ddpilot.session.nodes import messages
from ddpilot.session.nodes.link import Link
from ddpilot.session.status import collect_usage
from ddpilot.watch.snapshot.files import take_stacks

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
            address = network.find_master_address(reached_at) if num_nodes > 1 else "127.0.0.1"
            self._store, port = network.open_store(address)
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
        interfaces = network.interface_variables(placement.master_addr, request.master_port)
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
