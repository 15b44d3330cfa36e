# SPDX-License-Identifier: Apache-2.0
"""`KernelProcesses`: the rank processes of a session, started by the same spawner as those of `launch`."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ddpilot.errors import LaunchError
from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.rank_environment import default_variables, resolve_nproc
from ddpilot.launching.rank_reports import Raised
from ddpilot.launching.rank_server.client import ensure_server
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.launching.spawning import (
    Ended,
    ForkedRanks,
    RankSpawner,
    Reported,
    SpawnerEvent,
    Wrote,
    find_working_directory,
    may_fork,
)
from ddpilot.launching.system_limits import check_open_files
from ddpilot.module_names import SESSION_MAIN, SESSION_PRELOAD
from ddpilot.output.writer import LabelledWriter
from ddpilot.session.arguments import refuse_in_a_rank
from ddpilot.session.kernels.io_thread import IOThread
from ddpilot.session.nodes.node_ranks import Cluster, NodeLoss, NodeRanks
from ddpilot.session.protocol.messages import KernelStart, serve
from ddpilot.watch.snapshot.model import PythonStack

# Not matplotlib: its import reads the backend from the environment and ties figures to a shell.
PRELOAD = (
    "ipykernel.kernelapp",
    "ipykernel.debugger",
    SESSION_MAIN,
    SESSION_PRELOAD,
)


_STACKS_LIMIT_S = 3.0


class KernelProcesses:
    """The processes of a session's ranks, each of which runs a kernel; started by a `RankSpawner`.

    `kernel_start` is called for each rank that starts and returns its `KernelStart`. Methods other than `prepare_start`
    are called in the hub's thread, which gets what the processes write (`Wrote`) and how they end (`Ended`).
    """

    def __init__(
        self, options: LaunchOptions, kernel_start: Callable[[], KernelStart], cluster: Cluster | None = None
    ) -> None:
        self._kernel_start = kernel_start
        self._directory = find_working_directory("starting a session")
        self._environ: Mapping[str, str] = {**default_variables(stays=True), **os.environ, **options.env}
        self._options = replace(options, preload=(*PRELOAD, *options.preload))
        self._note = LabelledWriter(options.output, None).note
        self._spawner: RankSpawner | None = None
        self._raised: dict[int, Raised] = {}
        self.nodes: NodeRanks | None = None
        """The spawner, if ranks run on other machines."""
        if cluster is not None:
            self._spawner = self.nodes = NodeRanks(cluster, self._options, options.env, self._note)
            self.world_size = self.nodes.world_size
            return
        self.world_size = resolve_nproc(options.nproc_per_node, self._environ, self._note, backend=options.backend)
        check_open_files("starting a session", self.world_size)

    @property
    def can_start(self) -> bool:
        """True if ranks can still be started after `attach`."""
        return self._spawner is None or self._spawner.can_start

    def attach(self, hub: IOThread) -> None:
        """Start the ranks' store, and emit events through the hub; called once, before the first start of a rank."""
        self._hub = hub
        if self._spawner is None:
            folder = str(self._kernel_start().folder)
            self._spawner = ForkedRanks(self._options, self._environ, self.world_size, self._note, {}, folder)
        self._spawner.attach(hub, self._on_event)

    def add_hooks(self, hooks: tuple[str, ...], variables: Mapping[str, str]) -> None:
        self._attached.add_hooks(hooks, variables)

    def prepare_start(self, did: str, ranks: Sequence[int]) -> None:
        """Start the hosts of those of `ranks` whose node was lost, which takes seconds. Not for the I/O thread.

        Raises LaunchError if that fails, or if the session's working directory was removed: no rank can be started.
        """
        if self.nodes is not None:
            self.nodes.reopen(ranks)
        elif not os.path.isdir(self._directory):
            raise LaunchError(
                did,
                found=f"{self._directory}, the working directory of the session, was removed",
                fix="Make it again (`os.makedirs`), or stop the session and start one elsewhere",
            )

    def start(self, rank: int, generation: int) -> None:
        """Start the process of a rank that has none. `generation` is the number of times the group has been rebuilt."""
        start = self._kernel_start()
        if self.nodes is not None:
            start = replace(start, folder=Path(self.nodes.node_of(rank).folder))
        parcel, _ = ship("ddpilot-kernel", {}, (serve, (start,), {}), did="starting ranks", known=None)
        self._raised.pop(rank, None)
        try:
            self._attached.start(rank, parcel, "serve_kernel", sources={}, restart=generation)
        finally:
            os.close(parcel)

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to the processes of `ranks`; SIGKILL goes to their whole process groups."""
        self._attached.signal(ranks, number, group=number == signal.SIGKILL)

    def drain(self, rank: int) -> None:
        """Send the hub everything that the rank's process has written so far. Called when a cell ends on it."""
        self._attached.drain(rank)

    def pid(self, rank: int) -> int | None:
        return None if self._spawner is None else self._spawner.pid(rank)

    def is_live(self, rank: int) -> bool:
        return self._spawner is not None and self._spawner.is_live(rank)

    def take_stacks(self, ranks: Sequence[int]) -> dict[int, PythonStack]:
        """Return the main thread's stack of each of `ranks`, which run on other machines, if it responds."""
        assert self.nodes is not None
        return {
            rank: replace(stack, taken_ns=stack.taken_ns - int(self.nodes.node_of(rank).offset_s * 1e9))
            for rank, stack in self.nodes.ask("stacks", ranks, _STACKS_LIMIT_S).items()
        }

    def find_loss(self, rank: int) -> NodeLoss | None:
        """Return what was lost with the node of `rank`; None if it is not lost, or this machine."""
        return None if self.nodes is None else self.nodes.find_loss(rank)

    def host_of(self, rank: int) -> str:
        """Return the name of the machine on which a rank runs."""
        return platform.node() if self.nodes is None else self.nodes.node_of(rank).name

    def describe_end(self) -> str:
        """Return why no rank can be started any more, as a sentence."""
        return "the rank server has died" if self.nodes is None else self.nodes.describe_end()

    def close(self) -> None:
        if self._spawner is not None:
            self._spawner.close()

    @property
    def _attached(self) -> RankSpawner:
        assert self._spawner is not None  # `attach` comes first
        return self._spawner

    def _on_event(self, event: SpawnerEvent) -> None:
        if isinstance(event, Reported) and isinstance(event.report, Raised):
            self._raised[event.rank] = event.report
        elif isinstance(event, Wrote):
            self._hub.emit(event)
        elif isinstance(event, Ended):
            raised = self._raised.get(event.rank)
            if raised is not None and event.exited is not None:
                text = f"its kernel ended with {raised.type_name}: {raised.message}\n{raised.traceback}".rstrip()
                event = replace(event, reason=text)
            self._hub.emit(event)


def warm_up() -> None:
    """Start the rank server for the first session of this process, unless it is running. Takes a second or two.

    Raises LaunchError for the same reasons as starting a session.
    """
    refuse_in_a_rank()
    options = LaunchOptions()
    ensure_server({**default_variables(stays=True), **os.environ, **options.env}, PRELOAD, may_fork(options))
