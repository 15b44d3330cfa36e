# SPDX-License-Identifier: Apache-2.0
"""`RankContext`: state of a rank in a session: its namespace, its process group and its apps."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from ddpilot.environments.detect import detect_topology
from ddpilot.errors import GroupError
from ddpilot.findings.text import render_ranks
from ddpilot.group.creation import CHECKS_BEFORE_JOINING
from ddpilot.group.device import detect_device_facts, resolve_device, use_device
from ddpilot.group.init_group import init_group, seed_all
from ddpilot.group.process_group import Group
from ddpilot.record.flight_ring.reader import count_begun
from ddpilot.record.hook import RING_DIR_VARIABLE, ring_path
from ddpilot.session.apps import AppContext, find_app
from ddpilot.session.protocol.messages import KernelStart, Scope
from ddpilot.session.rank.session_group import SessionGroup, enter_when_needed


class RankContext:
    """The state of one rank of a session."""

    def __init__(self, namespace: dict[str, Any], start: KernelStart) -> None:
        self.namespace = namespace
        self.start = start
        self.topology = detect_topology(os.environ)
        choice = resolve_device(
            detect_device_facts(os.environ, self.topology.local_rank), os.environ.get("DDPILOT_BACKEND")
        )
        self.device = use_device(choice)
        self.num_before: int | None = None
        """Number of collectives begun when the current cell or request started; None if not recorded."""
        self.names: dict[str, Any] = {
            "rank": self.topology.rank,
            "world_size": self.topology.world_size,
            "device": self.device,
            "group": SessionGroup(self.topology, self.device, self.enter_group),
        }
        """Values of the session's names in the namespace: `rank`, `world_size`, `device` and `group`."""
        self._reported: set[str] = set()
        self._scope = Scope()
        self._group: Group | None = None
        self._entering = False
        self._apps = [find_app(name) for name in start.apps]
        self._cleanup = ExitStack()

    def begin(self, scope: Scope) -> None:
        """A cell or request starts. Names of the session that were deleted are set again."""
        for name, value in self.names.items():
            self.namespace.setdefault(name, value)
        self._scope = scope
        self.num_before = self._count_begun()

    def end(self) -> None:
        """The cell or request is over."""
        self._scope = Scope(blocked=self._scope.blocked)

    def count_collectives(self) -> int | None:
        """Return the number of collectives begun since the cell or request started; None if not recorded."""
        num_begun = self._count_begun()
        return None if num_begun is None or self.num_before is None else num_begun - self.num_before

    def _count_begun(self) -> int | None:
        folder = os.environ.get(RING_DIR_VARIABLE)
        return count_begun(ring_path(folder, self.topology.rank)) if folder else None

    def describe_changed(self) -> str:
        """Return a message if a cell has changed `rank` or `world_size`, such as in a loop; once per name, else ""."""
        for name in ("rank", "world_size"):
            value, own = self.namespace.get(name, self.names[name]), self.names[name]
            if name in self._reported or (isinstance(value, int) and value == own):
                continue
            self._reported.add(name)
            now = value if isinstance(value, int) else f"of type {type(value).__name__}"
            return f"`{name}` is now {now}, it was {own}: `del {name}` restores the session's value in the next cell"
        return ""

    def enter_group(self) -> Group:
        """Return the group of this rank. Enters one if the rank is not in a group, which is collective."""
        if self._group is not None and self._group.is_live:
            return self._group
        self._group = init_group()
        return self._group

    def _enter_for_torch(self) -> None:
        if self._entering:  # called by torch while the group is being entered
            return
        self._entering = True
        try:
            self.enter_group()
        finally:
            self._entering = False

    def _refuse_alone(self) -> None:
        did = f"entering the group of {self.topology.world_size} ranks"
        if self._scope.blocked:
            raise GroupError(did, found=self._scope.blocked, rank=self.topology.rank)
        ranks = self._scope.ranks
        missing = sorted({*range(self.topology.world_size)} - {*ranks}) if ranks else []
        if missing:
            raise GroupError(
                did,
                found=f"this cell runs on {render_ranks(ranks)} only, but {render_ranks(missing)} must enter it too",
                fix="Run this cell on all ranks: a collective needs every rank",
                rank=self.topology.rank,
            )

    def app_context(self) -> AppContext:
        """Return the argument for the apps' functions."""
        return AppContext(
            rank=self.topology.rank,
            world_size=self.topology.world_size,
            local_rank=self.topology.local_rank,
            device=self.device,
            namespace=self.namespace,
            verbose=self.start.verbose,
            seed=self.start.seed,
            enter_group=self.enter_group,
            is_everywhere=lambda: not self._scope.ranks,
            cleanup=self._cleanup,
        )

    def prepare(self) -> None:
        """Set the session's names in the namespace, seed random number generators and run the apps' initializers."""
        self.namespace.update(self.names)
        CHECKS_BEFORE_JOINING.append(self._refuse_alone)
        enter_when_needed(self._enter_for_torch)
        if self.start.seed is not None:
            seed_all(self.start.seed)
        for app in self._apps:
            for statement in app.imports:
                exec(statement, self.namespace)
            if app.initializer is not None:
                app.initializer(self.app_context())

    def after_cell(self) -> None:
        """Run the apps' `after_cell` functions."""
        for app in self._apps:
            if app.after_cell is not None:
                app.after_cell(self.app_context())

    def finish(self) -> None:
        """Run the apps' finalizers and clean-up callbacks, in reverse order, at the end of the session."""
        for app in reversed(self._apps):
            if app.finalizer is not None:
                app.finalizer(self.app_context())
        self._cleanup.close()
