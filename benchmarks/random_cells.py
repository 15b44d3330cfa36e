# SPDX-License-Identifier: Apache-2.0
"""Random faults in the cells of a session of 4 ranks with a live DDP model: is the notebook ever blocked, is a variable
of a surviving rank ever lost, does the model always train on, and is an orphan left?

What every rank must hold after each cell is worked out here, on one process, and compared by value.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.cell_faults import KINDS, MAKE, Drawn, Kind, draw_cells
from benchmarks.cell_model import NUM_RANKS, Expected, raise_on
from benchmarks.leftovers import MARK, describe_process, marked_pids, settle
from benchmarks.measure import Row, main, render_values
from benchmarks.quiet_view import QuietView
from ddpilot import LaunchError, LaunchInterrupted, RankError, Session
from ddpilot.launching.rank_server.client import server_pids, stop_servers

BLOCKED_LIMIT_S = 5.0
SHOWN_LIMIT_S = 1.0
"""From the fault to its report."""

STATE = "(list(notes), count, snapshot(model.module, optimizer))"
_HEALTHY_STEPS = 2


@dataclass
class Play:
    """What was seen, in seconds, and everything that was wrong."""

    blocked_s: list[float] = field(default_factory=list)
    shown_s: list[float] = field(default_factory=list)
    stopped_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Player:
    """Plays random cells on a session and knows what every rank must hold."""

    def __init__(self, session: Session, view: QuietView, folder: Path, patience: float) -> None:
        self.play = Play()
        self._patience = patience
        self._session = session
        self._view = view
        self._folder = folder
        self._now = "start"
        self._notes: list[list[int]] = [[] for _ in range(NUM_RANKS)]
        self._num_made = 0
        # What a process's first DDP model imports takes each rank a second: no fault's doing, so it is not measured.
        session.execute("import torch._dynamo")
        self._make()

    def cell(self, number: int, drawn: Drawn) -> None:
        """Play one random cell, judge it, and where ranks died bring them back."""
        self._now = f"cell {number}, {drawn}"
        kind = KINDS[drawn.kind]
        for path in self._folder.iterdir():
            path.unlink()
        self._view.forget()
        if kind.special == "kill idle":
            os.kill(self._session.pull("os.getpid()", rank=drawn.rank), signal.SIGKILL)
            while self._session.status()[drawn.rank].state != "dead":
                time.sleep(0.01)
        with self._stopping(drawn, kind):
            end = self._block(lambda: self._run(number, drawn, kind))
        self._judge(drawn, kind, end)
        dead = self._check_after(number, drawn, kind)
        if dead:
            self._bring_back(dead, drawn)
        elif kind.breaks_off_step:
            self._make()
        if not drawn.in_a_row:
            self._healthy()

    def _run(self, number: int, drawn: Drawn, kind: Kind) -> None:
        if kind.special == "call":
            self._session.run(raise_on, drawn.rank, str(self._folder))
        else:
            self._session.execute(drawn.code(number), ranks=drawn.ranks())

    def _block(self, work: Callable[[], object]) -> BaseException | None:
        start = time.monotonic()
        error: BaseException | None = None
        try:
            work()
        except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001  # it is judged
            error = raised
        self.play.blocked_s.append(time.monotonic() - start)
        if self.play.blocked_s[-1] > BLOCKED_LIMIT_S * self._patience:
            self._complain(f"blocked for {self.play.blocked_s[-1]:.1f} s; {self._view.notes}")
        return error

    @contextmanager
    def _stopping(self, drawn: Drawn, kind: Kind) -> Iterator[None]:
        """Press stop when all ranks of the cell have come to `here()`; where it raises, it need not."""
        if "stops" not in kind.end and not kind.is_uninterruptible:
            yield
            return
        is_over = threading.Event()
        thread = threading.Thread(target=self._stop, args=(drawn, kind, is_over))
        thread.start()
        start = time.monotonic()
        yield
        is_over.set()
        thread.join()
        self.play.stopped_s.append(time.monotonic() - start)

    def _stop(self, drawn: Drawn, kind: Kind, is_over: threading.Event) -> None:
        if "stops" in kind.end:
            while len(list(self._folder.glob("?"))) < len(drawn.ranks() or range(NUM_RANKS)):
                if is_over.wait(0.005):
                    return
            if is_over.wait(drawn.delay_s):
                return
            self._press(drawn)
        while kind.is_uninterruptible and not is_over.wait(0.1):
            if any("press stop" in note for note in self._view.notes):
                self._press(drawn)

    def _press(self, drawn: Drawn) -> None:
        if drawn.by_signal:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            self._session.interrupt()

    # judging

    def _complain(self, text: str) -> None:
        self.play.wrong.append(f"{self._now}: {text}")

    def _judge(self, drawn: Drawn, kind: Kind, end: BaseException | None) -> None:
        name = {type(None): "passes", LaunchInterrupted: "stops", RankError: "raises"}.get(type(end), repr(end))
        if name not in kind.end:
            self._complain(f"it {name}: {end}")
        if not isinstance(end, RankError):
            return
        if kind.blames != "any" and end.rank != getattr(drawn, kind.blames):
            self._complain(f"rank {end.rank} was blamed: {end}")
        if kind.error not in str(end):
            self._complain(f"no {kind.error} in: {end}")
        if len(self._view.errors) != 1:
            self._complain(f"{len(self._view.errors)} errors were shown")
        stamps = [float(path.read_text()) for path in self._folder.glob("?")]
        if stamps and kind.end == "raises":
            self.play.shown_s.append(self._view.shown_s[0] - min(stamps))
            if self.play.shown_s[-1] > SHOWN_LIMIT_S * self._patience:
                self._complain(f"shown after {self.play.shown_s[-1]:.1f} s")

    def _check_after(self, number: int, drawn: Drawn, kind: Kind) -> list[int]:
        """Compare every surviving rank with what it must hold; the ranks that died."""
        if kind.only == "all" and not kind.special:
            self._count += drawn.steps + 3 * (drawn.kind == "steps")
        if not kind.special:
            for rank in drawn.ranks() or range(NUM_RANKS):
                self._notes[rank].append(number)
        states, dead = self._pull()
        if kind.special == "kill idle":
            for rank in {*range(NUM_RANKS)} - {drawn.rank}:
                self._notes[rank].append(number)
        must_die = {getattr(drawn, kind.kills)} if kind.kills in ("rank", "other") else set()
        if (kind.kills != "any" and {*dead} != must_die) or len(dead) == NUM_RANKS:
            self._complain(f"ranks {dead} died: {self._view.notes}")
        for rank, state in states.items():
            self._check(rank, state, exact=not kind.breaks_off_step)
        if kind.breaks_off_step:
            self._check_said_apart([state[2] for state in states.values()])
        return dead

    def _pull(self) -> tuple[dict[int, tuple[list[int], int, torch.Tensor]], list[int]]:
        states, dead = {}, []
        for rank in range(NUM_RANKS):
            try:
                states[rank] = self._session.pull(STATE, rank=rank)
            except LaunchError as error:
                if "is dead" not in str(error):
                    raise
                dead.append(rank)
        return states, dead

    def _check(self, rank: int, state: tuple[list[int], int, torch.Tensor], *, exact: bool = True) -> None:
        notes, count, values = state
        if notes != self._notes[rank]:
            self._complain(f"rank {rank} holds notes {notes[-3:]} instead of {self._notes[rank][-3:]}")
        if exact and count != self._count:
            self._complain(f"rank {rank} made {count} steps instead of {self._count}")
        elif exact and not torch.allclose(values, self._expected.after(count), rtol=1e-9, atol=1e-12):
            apart = (values - self._expected.after(count)).abs().max().item()
            self._complain(f"rank {rank}: parameters or momentum are {apart:.1e} away from what they must be")

    def _check_said_apart(self, values: Sequence[torch.Tensor]) -> None:
        parameters = [each[: len(each) // 2] for each in values]
        are_apart = any(not torch.equal(each, parameters[0]) for each in parameters)
        was_said = any("continue to differ" in note for note in self._view.notes)
        if are_apart != was_said:
            self._complain(f"replicas are {'' if are_apart else 'not '}apart; {self._view.notes}")

    # going on

    def _bring_back(self, dead: Sequence[int], drawn: Drawn) -> None:
        if drawn.while_dead:
            end = self._block(lambda: self._session.execute("group.barrier()"))
            if not isinstance(end, RankError) or f"{dead[0]}" not in str(end) or "dead" not in str(end):
                self._complain(f"a collective while ranks {dead} are dead gave {end!r}")
        for rank in dead:
            end = self._block(lambda rank=rank: self._session.restart(rank))  # type: ignore[misc]
            self._notes[rank] = []
            if end is not None:
                self._complain(f"restart of rank {rank}: {end!r}")
        self._make()

    def _make(self) -> None:
        self._num_made += 1
        self._count = 0
        self._expected = Expected(self._num_made)
        bucket_mb = 0.001 if self._num_made % 2 else 25
        code = MAKE.format(seed=self._num_made, folder=str(self._folder), bucket_mb=bucket_mb)
        end = self._block(lambda: self._session.execute(code))
        if end is not None:
            self._complain(f"making the model: {end!r}")

    def _healthy(self) -> None:
        end = self._block(lambda: self._session.execute(f"train({_HEALTHY_STEPS})"))
        self._count += _HEALTHY_STEPS
        if end is not None:
            self._complain(f"the next healthy cell: {end!r}")
        states, _ = self._pull()
        for rank, state in states.items():
            self._check(rank, state)


def play_cells(cells: Sequence[Drawn], *, patience: float = 1.0) -> Play:
    """Play random cells on a session of 4 ranks up to the first that goes wrong, and look for what is left of it.

    `patience`: by which the limits are multiplied, for a machine that does other things too.
    """
    mark = os.environ[MARK]
    before = _processes(mark)
    view = QuietView()
    with tempfile.TemporaryDirectory() as folder:
        with Session(NUM_RANKS, view=view) as session:
            player = Player(session, view, Path(folder), patience)
            for number, drawn in enumerate(cells):
                player.cell(number, drawn)
                if player.play.wrong:
                    break  # what follows would follow from it
        left = settle(lambda: sorted(_processes(mark) - before), grace_s=2.0)
    player.play.wrong += [f"orphan: {process}" for process in left]
    return player.play


def _processes(mark: str) -> set[str]:
    spared = {os.getpid(), *server_pids()}
    return {describe_process(pid) for pid in marked_pids(mark) - spared}


def measure(rounds: int) -> list[Row]:
    """The bar over `rounds` cells; what was wrong goes to stderr."""
    os.environ[MARK] = uuid.uuid4().hex
    play = play_cells(draw_cells(rounds))
    stop_servers()
    for text in play.wrong:
        print(text, file=sys.stderr)
    return [
        Row(
            what=f"{rounds} random cells with faults on {NUM_RANKS} ranks: notebook blocked",
            ours=f"{render_values(play.blocked_s)}, {len(play.wrong)} wrong",
            peer="",
            ratio=f"fault to error shown: {render_values(play.shown_s)}",
            bar="never above 5 s, survivors' state as it must be, 0 orphans",
            holds=not play.wrong,
        )
    ]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=300))
