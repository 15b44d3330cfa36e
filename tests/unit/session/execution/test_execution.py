# SPDX-License-Identifier: Apache-2.0
"""Cells on fake kernels that reply at once: success, failure, recovery."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from ddpilot.errors import RankError
from ddpilot.launching.rank_reports import Raised
from ddpilot.session.execution.execution import Execution
from ddpilot.session.execution.outcome import Outcome
from ddpilot.session.execution.recovery import Recovery
from ddpilot.session.kernels.event_router import Event, Interrupted, InterruptListener, KernelMessage, Turn
from ddpilot.session.kernels.states import RankStates
from ddpilot.session.protocol.messages import REPORT_KEY, Compare, Rebuild, Report, Request

REBUILT = {"rebound": 0, "unbound": [], "disagreements": [], "named": {}, "lost": ["DeviceMesh"]}


def raised(time_s: float, *, is_victim: bool = False) -> Raised:
    """An error on a rank."""
    return Raised(
        time_s=time_s,
        type_name="ValueError",
        message="boom",
        traceback="",
        is_victim=is_victim,
        interrupted=False,
        exitcode=1,
    )


class FakeKernels:
    """Two ranks in a process group, whose kernels reply to a cell with `reports` and to every request with success."""

    def __init__(self, folder: Path, reports: Sequence[Report]) -> None:
        self.reports = reports
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.turn = Turn(self.events, InterruptListener(self.events))
        self.world_size = 2
        self.generation = 0
        self.lost: tuple[str, ...] = ()
        self.states = RankStates(2)
        self.ring_folder = folder
        self.notes: list[str] = []
        self.requests: list[Request] = []
        self.num_freed = 0
        self.options = SimpleNamespace(respawn=False)
        self.processes = SimpleNamespace(is_live=lambda rank: True, pid=lambda rank: None, nodes=None)
        self.io_thread = SimpleNamespace(send=self._free)
        self.view = SimpleNamespace(
            begin=lambda ranks: None,
            end=lambda: None,
            show=lambda now_s: None,
            next_due_s=lambda: None,
            note=self.notes.append,
            error=lambda error: None,
        )

    def cell(self) -> Outcome:
        """Run a cell on both ranks, without recovery."""
        ids = {rank: self._reply(rank, "shell", report) for rank, report in enumerate(self.reports)}
        return Execution(ids, cast("Any", self), self.turn, name="Cell In[1]", number=1).run()

    def request(self, request: Request, ranks: Sequence[int]) -> dict[int, str]:
        """Reply with success."""
        self.requests.append(request)
        return {rank: self._reply(rank, "shell", Report(has_group=True, value=REBUILT)) for rank in ranks}

    def hide_torch_logs(self, ranks: Sequence[int]) -> None:
        """Count the ranks that are freed."""
        self.num_freed += len(ranks)

    def show_torch_logs(self) -> None:
        """Called after the rebuild."""

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """No rank stays busy."""

    def _free(self, ranks: Sequence[int], channel: str, _kind: str, _content: dict[str, Any]) -> dict[int, str]:
        report = Report(has_group=True, value={"backend": "gloo", "unfinished": False})
        return {rank: self._reply(rank, channel, report) for rank in ranks}

    def _reply(self, rank: int, channel: str, report: Report) -> str:
        sent = f"{rank}.{self.events.qsize()}"
        idle: dict[str, Any] = {"execution_state": "idle"}
        content = {REPORT_KEY: report.to_content()}
        for name, kind, each in ((channel, "reply", content), ("iopub", "status", idle)):
            self.events.put(
                KernelMessage(
                    rank=rank,
                    channel=name,
                    kind=kind,
                    parent_id=sent,
                    content=each,
                    metadata={},
                    buffers=[],
                    header={},
                )
            )
        return sent


def test_a_cell_that_succeeds_leaves_the_ranks_alone(tmp_path: Path) -> None:
    """Nothing is freed or rebuilt, and all ranks are idle."""
    kernels = FakeKernels(tmp_path, [Report(has_group=True), Report(has_group=True)])
    outcome = kernels.cell()
    Recovery(cast("Any", kernels)).recover(outcome, kernels.turn)
    assert (outcome.error, outcome.was_aborted, outcome.busy) == (None, False, ())
    assert (kernels.num_freed, kernels.requests, kernels.states.busy) == (0, [], {})


def test_a_cell_that_fails_is_blamed_on_the_first_failure_and_the_group_is_rebuilt(tmp_path: Path) -> None:
    """The error names the cause, not its victim; the new group has the backend of the old one."""
    victim = Report(raised=raised(1.0, is_victim=True), has_group=True, num_collectives=1)
    kernels = FakeKernels(tmp_path, [victim, Report(raised=raised(2.0), has_group=True, num_collectives=0)])
    outcome = kernels.cell()
    assert isinstance(outcome.error, RankError)
    assert (outcome.error.rank, sorted(outcome.freed), outcome.is_group_intact) == (1, [0, 1], False)
    Recovery(cast("Any", kernels)).recover(outcome, kernels.turn)
    assert kernels.requests == [Rebuild(generation=1, enter=True, backend="gloo")]
    assert kernels.lost == ("DeviceMesh",)
    assert kernels.notes[0].startswith("the process group was freed and rebuilt in 0.0 s, variables are kept")
    assert kernels.notes[1] == "lost with the old group; create again what you still need: DeviceMesh"


def test_a_failure_before_any_collective_spares_the_group(tmp_path: Path) -> None:
    """Ranks that ended differently are compared."""
    reports = [Report(has_group=True, num_collectives=0), Report(raised=raised(1.0), has_group=True, num_collectives=0)]
    kernels = FakeKernels(tmp_path, reports)
    outcome = kernels.cell()
    Recovery(cast("Any", kernels)).recover(outcome, kernels.turn)
    assert (outcome.is_group_intact, kernels.num_freed, kernels.requests) == (True, 0, [Compare()])


def test_the_first_of_interrupts_to_confirm_only_shows_how_to_cancel(tmp_path: Path) -> None:
    """As while the group is being rebuilt."""
    kernels = FakeKernels(tmp_path, [])
    kernels.events.put(Interrupted())
    ids = kernels.request(Compare(), (0, 1))
    outcome = Execution(ids, cast("Any", kernels), kernels.turn, name="rebuilding", confirm_interrupt=True).run()
    assert not outcome.was_aborted
    assert kernels.notes == ["rebuilding the process group, which takes a moment; interrupt again to cancel"]
