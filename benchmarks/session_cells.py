# SPDX-License-Identifier: Apache-2.0
"""Cells of a session: round trip of `1+1`, and what happens when one rank raises while the others wait for it.

The moment of the raise is told by the rank: the monotonic clock is one for the whole machine. The peer is ipyparallel,
which is given a few seconds after the raise.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time

from benchmarks.measure import Row, main, render_values, seconds
from benchmarks.quiet_view import QuietView
from benchmarks.session_peers import ALL_REDUCE, ipyparallel_ranks
from ddpilot import RankError, Session

ROUND_TRIP_LIMITS_S = {2: 0.015, 16: 0.120}
SHOWN_LIMIT_S = 1.0
WORKS_LIMIT_S = 3.0
PEER_LIMIT_S = 5.0

MODEL = """
import time, torch
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
step()
"""
RAISE = "if rank == 1:\n    raised_s = time.monotonic()\n    raise ValueError('bad sample')\nstep()"


def round_trips(num_ranks: int, rounds: int) -> list[float]:
    """Seconds of `1+1` on all ranks."""
    with Session(num_ranks, view=QuietView(), env={"OMP_NUM_THREADS": "1"}) as session:
        session.execute("1+1")
        return [seconds(lambda: session.execute("1+1")) for _ in range(rounds)]


def peer_round_trips(rounds: int) -> list[float]:
    """The same of ipyparallel, 2 ranks."""
    with ipyparallel_ranks() as execute:
        execute("1+1")
        return [seconds(lambda: execute("1+1")) for _ in range(rounds)]


def failures(num_ranks: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds from the raise until the error is shown, and from there until the next cell's training step is done."""
    view = QuietView()
    shown, works = [], []
    with Session(num_ranks, view=view) as session:
        session.execute(MODEL)
        for _ in range(rounds):
            view.forget()
            with contextlib.suppress(RankError):
                session.execute(RAISE)
            session.execute("step()")
            shown.append(view.shown_s[0] - session.pull("raised_s", rank=1))
            works.append(time.monotonic() - view.shown_s[0])
    return shown, works


def peer_failure() -> str:
    """Whether ipyparallel has shown the error within five seconds, and whether a collective works then."""
    with ipyparallel_ranks() as execute:
        execute(ALL_REDUCE.format(num_ranks=2))
        ended = threading.Event()

        def run() -> None:
            with contextlib.suppress(Exception):  # the raise, or the end of the engines
                execute("if rank == 1: raise ValueError('bad sample')\ntorch.distributed.all_reduce(ones)")
            ended.set()

        threading.Thread(target=run, daemon=True).start()
        if ended.wait(PEER_LIMIT_S):
            return f"ipyparallel: ended within {PEER_LIMIT_S:g} s"
        return f"ipyparallel: nothing shown after {PEER_LIMIT_S:g} s"


def measure(rounds: int) -> list[Row]:
    """All bars."""
    rows = []
    try:
        peer_said = f"ipyparallel, 2 ranks {render_values(peer_round_trips(rounds))}"
        failure_said = peer_failure()
        ran = True
    except ImportError as error:
        peer_said = failure_said = f"did not run: {error}"
        ran = False
    for num_ranks, limit_s in ROUND_TRIP_LIMITS_S.items():
        taken = round_trips(num_ranks, rounds)
        rows.append(
            Row(
                what=f"`1+1` on {num_ranks} ranks",
                ours=render_values(taken),
                peer=peer_said if num_ranks == 2 else "",
                ratio="",
                bar=f"median at most {limit_s * 1000:.0f} ms",
                holds=ran and statistics.median(taken) <= limit_s,
            )
        )
    for num_ranks in (2, 4):
        shown, works = failures(num_ranks, max(3, rounds // 10))
        rows.append(
            Row(
                what=f"one of {num_ranks} ranks raises in a DDP step: until shown; then until the next step is done",
                ours=f"{render_values(shown)}; {render_values(works)}",
                peer=failure_said if num_ranks == 2 else "",
                ratio="",
                bar="each within 1 s and 3 s",
                holds=ran and max(shown) <= SHOWN_LIMIT_S and max(works) <= WORKS_LIMIT_S,
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, rounds=50))
