# SPDX-License-Identifier: Apache-2.0
"""`Runner`: runs cells, calls and other requests on ranks, and recovers after failures."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ddpilot.errors import LaunchError
from ddpilot.findings.text import render_ranks
from ddpilot.record.flight_ring.reader import count_begun
from ddpilot.record.hook import ring_path
from ddpilot.session.execution.execution import Execution
from ddpilot.session.execution.outcome import CountMismatch, Outcome
from ddpilot.session.execution.recovery import Recovery
from ddpilot.session.kernels.cell_watch import CellObserver, FindingsObserver, SubsetObserver
from ddpilot.session.kernels.event_router import KernelMessage
from ddpilot.session.kernels.manager import RankKernels
from ddpilot.session.protocol.messages import REPORT_KEY, Call, CellRequest, Finish, ParcelRequest


class Runner:
    """Runs cells and requests on ranks. After a failure the group is freed and rebuilt; all variables are kept."""

    def __init__(self, kernels: RankKernels) -> None:
        self._kernels = kernels
        self._recovery = Recovery(kernels)
        self._counts = CountMismatch(kernels.ring_folder)

    def cell(
        self,
        code: str,
        ranks: Sequence[int],
        *,
        number: int,
        quiet: bool,
        keep_cache: bool,
        profile_folder: str = "",
    ) -> Outcome:
        """Run a cell on `ranks`, and recover if it fails. `profile_folder`: as of `CellRequest`."""
        content = {
            "code": code,
            "silent": False,
            "store_history": False,
            "user_expressions": {},
            "allow_stdin": not quiet,
            "stop_on_error": False,
        }
        name = f"Cell In[{number}]"
        with self._kernels.turn(f"running cell {number}") as turn:
            self._recovery.prepare(turn)
            request = CellRequest(
                number=number, keep_cache=keep_cache, scope=self._kernels.scope(ranks), profile_folder=profile_folder
            )
            make_observer = self._observer_maker(ranks, name, {name: code})
            num_begun = self._num_begun(ranks)
            metadata = {REPORT_KEY: asdict(request)}
            ids = self._kernels.io_thread.send(ranks, "shell", "execute_request", content, metadata)
            outcome = Execution(
                ids,
                self._kernels,
                turn,
                name=name,
                number=number,
                quiet=quiet,
                num_begun=num_begun,
                counts=self._counts,
                make_observer=make_observer,
            ).run()
            self._recovery.recover(outcome, turn)
        return outcome

    def call(
        self, request: ParcelRequest, ranks: Sequence[int], parcel: int | None, name: str
    ) -> tuple[Outcome, dict[int, memoryview]]:
        """Send a request with a parcel to `ranks`; return the outcome and, by rank, the parcels that they replied with.

        Recovers if the request fails. Closes `parcel`.
        """
        answers: dict[int, memoryview] = {}
        is_call = isinstance(request, Call)
        with contextlib.ExitStack() as stack:
            if parcel is not None:
                stack.callback(os.close, parcel)
            turn = stack.enter_context(self._kernels.turn(f"running {name}"))
            self._recovery.prepare(turn)
            make_observer = self._observer_maker(ranks, name, {}) if is_call else None
            num_begun = self._num_begun(ranks)
            calls = self._kernels.send_parcels(request.token, ranks, parcel)
            stack.callback(calls.close)
            outcome = Execution(
                self._kernels.request(request, ranks),
                self._kernels,
                turn,
                name=name,
                num_begun=num_begun,
                counts=self._counts if is_call else None,
                make_observer=make_observer,
            ).run()
            for rank, part in outcome.parts.items():
                if part.report is not None and (answer := calls.answer(rank)) is not None:
                    answers[rank] = answer
            self._recovery.recover(outcome, turn)
        return outcome, answers

    def restart(self, ranks: Sequence[int]) -> None:
        """Restart the processes of `ranks` under the same rank numbers, and rebuild the group if one was in use."""
        with self._kernels.turn(f"restarting {render_ranks(ranks)}") as turn:
            self._recovery.restart(ranks, turn)

    def ask_kernel(self, kind: str, content: dict[str, Any], rank: int, limit_s: float) -> dict[str, Any] | None:
        """Return the kernel's reply to a "complete" or "inspect" request.

        None if the rank is busy or does not reply within `limit_s` seconds.
        """
        deadline_s = time.monotonic() + limit_s
        try:
            with self._kernels.turn(f"asking rank {rank} to {kind}") as turn:
                sent = self._kernels.io_thread.send([rank], "shell", f"{kind}_request", content)[rank]
                while (left_s := deadline_s - time.monotonic()) > 0:
                    event = turn.events.get(timeout=left_s)
                    if isinstance(event, KernelMessage) and event.parent_id == sent and event.kind == f"{kind}_reply":
                        return event.content
                    self._kernels.idle_output.show(event)
        except (LaunchError, queue.Empty):
            pass
        return None

    def finish(self) -> None:
        """Ask the ranks to end, so that apps and exit handlers run. A rank that is busy does not react in time."""
        live = self._kernels.states.live
        self._kernels.idle_output.is_ending = True
        self._kernels.request(Finish(), live)
        self._kernels.states.await_ends(live)

    def _num_begun(self, ranks: Sequence[int]) -> dict[int, int | None]:
        """Return the number of collectives that each rank has begun. Called before a cell is sent to the ranks.

        A cell may hold the GIL from its first line on, so that the rank's threads report nothing.
        """
        folder = self._kernels.ring_folder
        return {rank: count_begun(ring_path(folder, rank)) for rank in ranks}

    def _observer_maker(
        self, ranks: Sequence[int], name: str, sources: Mapping[str, str]
    ) -> Callable[[], CellObserver | None]:
        """Return what makes the observer of a cell. Called before a cell is sent to the ranks.

        What the ranks do from this moment on is part of the cell: they may be waiting in a collective before the
        observer exists.
        """
        kernels, nodes = self._kernels, self._kernels.processes.nodes
        since_s = time.monotonic() - (nodes.clock_error_s() if nodes is not None else 0.0)
        others = {*kernels.states.live} - {*ranks}

        def make() -> CellObserver | None:
            if others:
                return SubsetObserver(ranks, others, folder=kernels.ring_folder, name=name, note=kernels.view.note)
            if kernels.watcher is None:
                return None
            return FindingsObserver(kernels.watcher, name, since_s, sources, kernels.view.note)

        return make
