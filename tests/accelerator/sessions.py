# SPDX-License-Identifier: Apache-2.0
"""What tests of sessions on the emulated accelerator share: the cells, and random faults in them."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from ddpilot import LaunchInterrupted, RankError, Session

LIMIT_S = 5.0
"""From a fault to the group that is rebuilt, or to the ranks that are replaced."""

MODEL = """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    optimizer.zero_grad()
    loss = model(torch.full((4, 8), rank + 1.0).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    return loss
"""
"""A live DDP model on the rank's device; `step()` returns before the device has made the step."""

LOOP = """
struck_s = None
for number in range({num_steps}):
    if rank == {rank} and number == {step}:
        struck_s = time.monotonic()
        {fault}
    loss = step(){wait}
"""

HEALTHY = """
total = torch.ones(1, device=device)
dist.all_reduce(total)
assert total.item() == world_size, total
assert not torch.isnan(step()).item()
"""

FAULTS = {
    "raise": "raise ValueError('bad sample')",
    "late": "time.sleep({delay_s})",
    "skip": "continue",
    "kill": "os.kill(os.getpid(), 9)",
    "stop": "pass",
    "hang": "time.sleep(1000)",
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens on `rank` before its `step`; `waits`: whether the loop waits for the device in each step."""

    kind: str
    rank: int
    step: int
    delay_s: float
    waits: bool

    def code(self) -> str:
        """The cell."""
        is_endless = self.kind in ("stop", "hang")
        return LOOP.format(
            num_steps=10**9 if is_endless else 12,
            rank=self.rank,
            step=self.step,
            fault=FAULTS[self.kind].format(delay_s=self.delay_s),
            wait=".item()" if self.waits else "",
        ) + ("" if is_endless else "torch.accelerator.synchronize()\n")


def draw_faults(count: int, num_ranks: int, seed: int = 0) -> list[Fault]:
    """`count` faults, the same for the same seed, the kinds in turn."""
    draw = random.Random(seed)
    kinds = list(FAULTS)
    return [
        Fault(
            kind=kinds[number % len(kinds)],
            rank=draw.randrange(num_ranks),
            step=draw.randrange(10),
            delay_s=draw.random() / 2,
            waits=draw.random() < 0.5,
        )
        for number in range(count)
    ]


def suffer(session: Session, fault: Fault) -> float:
    """Run the cell of `fault`, and what a person does about it; seconds from the fault until the ranks train on.

    A cell that ends well has none. AssertionError where it ends otherwise than it should.
    """
    needs_stop = fault.kind in ("skip", "stop", "hang")
    pressed_s: list[float] = []

    def press() -> None:
        pressed_s.append(time.monotonic())
        session.interrupt()

    button = threading.Timer(1.0 + fault.delay_s, press)
    if needs_stop:
        button.start()
    ended: BaseException | None = None
    try:
        session.execute(fault.code(), quiet=True)
    except (RankError, LaunchInterrupted) as error:
        ended = error
    finally:
        button.cancel()
        if button.ident is not None:
            button.join()
    ended_s = time.monotonic()
    assert (ended is None) == (fault.kind == "late"), f"{fault} ended with {ended!r}"
    if ended is None:
        return 0.0
    dead = [rank for rank in range(session.world_size) if rank not in session.pids()]
    assert dead == ([fault.rank] if fault.kind == "kill" else []), f"{fault}: {dead} died"
    began_s = pressed_s[0] if pressed_s else None
    if dead:
        session.restart(dead[0])
        session.execute(MODEL, quiet=True)
        began_s = began_s or ended_s
    elif began_s is None:
        began_s = session.pull("struck_s", rank=fault.rank)
    session.execute(HEALTHY, quiet=True)
    return time.monotonic() - began_s
