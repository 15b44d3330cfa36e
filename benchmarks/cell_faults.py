# SPDX-License-Identifier: Apache-2.0
"""The kinds of random cells: what each does on which rank, and how it has to end."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from benchmarks.cell_model import NUM_RANKS

End = Literal["passes", "raises", "stops", "raises or stops"]
Whose = Literal["nobody", "rank", "other", "any"]

MAKE = """
import ctypes, os, sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from benchmarks.cell_model import SlowData, loss_of, make_net, make_optimizer, snapshot, stamp
notes = globals().get("notes", [])
libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
seed, count, folder = {seed}, 0, {folder!r}
model = DistributedDataParallel(make_net(seed), bucket_cap_mb={bucket_mb})
optimizer = make_optimizer(model.module)
def train(num_steps):
    global count
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, seed, count, rank).backward()
        optimizer.step()
        count += 1
def here():
    stamp(folder, rank)
def bad(*ignored):
    here()
    raise ValueError("bad sample")
"""
"""The cell that makes everything; `notes` is what a rank keeps through all failures but its own death."""

BEGIN = "notes.append({number}); train({steps})\n"
"""How every cell begins."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`code` goes wrong on `rank` ({rank} in it; {other} is a different one). Ranks call `here()` right before."""

    code: str = ""
    end: End = "raises"
    blames: Whose = "rank"
    """Whose failure is to be reported, where it raises."""

    kills: Whose = "nobody"
    """Which ranks may die of it; "rank" and "other": that one has to."""

    error: str = "ValueError"
    """In the text of the report."""

    only: Literal["all", "rank", "without rank"] = "all"
    """The ranks that the cell runs on. Anything but "all" has no steps."""

    special: Literal["", "call", "kill idle"] = ""
    is_uninterruptible: bool = False
    """Whether a rank ends neither by an interrupt nor by itself: a person presses stop until it is killed."""

    breaks_off_step: bool = False
    """Whether the stop may hit the middle of a step, after which replicas may differ, and that is said."""


_AT = "if rank == {rank}:"
_HERE = "here()\n"
_HOLD_GIL = "libc.pthread_mutex_lock(lock); libc.pthread_mutex_lock(lock)\n"  # waits in C; a signal does not end it

KINDS = {
    "steps": Kind(code="train(3)", end="passes"),
    "raise": Kind(code=_AT + " bad()\ntrain(5)"),
    "raise in a step of its own": Kind(code=_AT + " bad()\nfor _ in range(3): group.barrier()"),
    "raise on all": Kind(code="bad()", blames="any"),
    "raise at rest": Kind(code=_AT + " bad()"),
    "raise in backward": Kind(
        code="handle = list(model.parameters())[{parameter}].register_hook(bad) if rank == {rank} else None\n"
        "try: train(1)\nfinally:\n    if handle: handle.remove()"
    ),
    "raise in backward on all": Kind(
        code="handle = list(model.parameters())[{parameter}].register_hook(bad)\ntry: train(1)\n"
        "finally: handle.remove()",
        blames="any",
    ),
    "raise in one rank's cell": Kind(code="bad()", only="rank"),
    "pass in one rank's cell": Kind(end="passes", only="rank"),
    "collective without one rank": Kind(
        code=_HERE + "group.barrier()", end="stops", only="without rank", blames="nobody"
    ),
    "sys.exit": Kind(code=_AT + "\n    here(); sys.exit(3)\ngroup.barrier()", error="SystemExit"),
    "raise in a function": Kind(special="call"),
    "SIGKILL": Kind(code=_AT + "\n    here(); os.kill(os.getpid(), 9)\ntrain(5)", kills="rank", error="SIGKILL"),
    "SIGSEGV": Kind(code=_AT + "\n    here(); ctypes.string_at(0)\ntrain(5)", kills="rank", error="SIGSEGV"),
    "os._exit": Kind(code=_AT + "\n    here(); os._exit(3)\ntrain(5)", kills="rank", error="3"),
    "SIGKILL between cells": Kind(code="train(1)", kills="rank", blames="any", error="dead", special="kill idle"),
    "other shape": Kind(
        code="here(); group.all_reduce(torch.ones(64 if rank == {rank} else 3))", kills="any", blames="any", error=""
    ),
    "other collective": Kind(
        code=_HERE + "group.barrier() if rank == {rank} else group.broadcast(torch.ones(3), src={rank})",
        end="raises or stops",
        kills="any",
        blames="any",
        error="",
    ),
    "collective that one rank leaves out": Kind(code=_HERE + "if rank != {rank}: group.barrier()", end="stops"),
    "step that one rank leaves out": Kind(code=_HERE + "if rank != {rank}: train(1)", end="stops"),
    "receive of what is not sent": Kind(
        code=_HERE + "if rank == {rank}: dist.recv(torch.ones(3), src={other})\ngroup.barrier()", end="stops"
    ),
    "stop of a loop": Kind(code=_HERE + "while True: pass", end="stops"),
    "stop of a sleep": Kind(code=_HERE + "if rank == {rank}: time.sleep(100)\ngroup.barrier()", end="stops"),
    "stop of a loader": Kind(
        code=_HERE + "for _ in DataLoader(SlowData(), num_workers=1): pass",
        end="stops",
    ),
    "stop of training": Kind(code=_HERE + "while True: train(1)", end="stops", breaks_off_step=True),
    "stop of C that holds the GIL": Kind(
        code=_HERE + "if rank == {rank}: " + _HOLD_GIL + "group.barrier()",
        end="stops",
        kills="rank",
        is_uninterruptible=True,
    ),
    "raise beside C that holds the GIL": Kind(
        code=_AT + " time.sleep(0.1); bad()\nif rank == {other}: " + _HOLD_GIL + "group.barrier()",
        kills="other",
        is_uninterruptible=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One random cell. `steps`: that every rank makes first; `delay_s`: from the last `here()` to the stop."""

    kind: str
    rank: int
    other: int
    steps: int
    parameter: int
    delay_s: float
    by_signal: bool
    """Stopped by SIGINT to this process; else by `Session.interrupt` from another thread."""

    while_dead: bool
    """Where ranks died: whether a cell is tried before they are started again."""

    in_a_row: bool
    """Whether the next random cell follows at once, without a healthy one between."""

    def code(self, number: int) -> str:
        """The cell's source."""
        kind = KINDS[self.kind]
        steps = self.steps if kind.only == "all" else 0
        return BEGIN.format(number=number, steps=steps) + kind.code.format(
            rank=self.rank, other=self.other, parameter=self.parameter
        )

    def ranks(self) -> list[int] | None:
        """Where it runs; None: on all."""
        others = [rank for rank in range(NUM_RANKS) if rank != self.rank]
        return {"all": None, "rank": [self.rank], "without rank": others}[KINDS[self.kind].only]


def draw_cells(count: int, seed: int = 0) -> list[Drawn]:
    """`count` random cells, the same for the same seed; every kind comes once in each round of all kinds."""
    draw = random.Random(seed)
    cells: list[Drawn] = []
    while len(cells) < count:
        for kind in draw.sample(list(KINDS), len(KINDS)):
            rank, other = draw.sample(range(NUM_RANKS), 2)
            cells.append(
                Drawn(
                    kind=kind,
                    rank=rank,
                    other=other,
                    steps=draw.randrange(3),
                    parameter=draw.randrange(6),
                    delay_s=draw.random() / 5,
                    by_signal=draw.random() < 0.5,
                    while_dead=draw.random() < 0.5,
                    in_a_row=draw.random() < 0.5,
                )
            )
    return cells[:count]
