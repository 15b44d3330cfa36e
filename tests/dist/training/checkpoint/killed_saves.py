# SPDX-License-Identifier: Apache-2.0
"""A process that forks savers and has them killed; run as a script, so that nothing else is forked with them.

`python -m tests.dist.training.checkpoint.killed_saves FOLDER before` kills at every call that reaches the disk, once;
`... FOLDER after TRIALS SEED` kills at random times. Prints one line of JSON for each saver.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.manifest import RunProgress

DISK_CALLS = ("fsync", "rename", "replace", "mkdir", "unlink")
LONGEST_LIFE = 5
"""In saves: however slow the machine is, some savers finish a few and others none."""


def save_steps(folder: Path, first: int, last: int, report: int) -> None:
    """Save steps `first` to `last`; each one's number goes to the descriptor `report` once it is on the disk."""
    directory = CheckpointDir(folder, keep=2, best="max acc")
    for step in range(first, last + 1):
        weights = {"model": {"w": torch.full((50_000,), float(step)), "b": torch.ones(3)}}
        directory.save(
            RunProgress(step=step), weights=weights, state={"n": step}, parts=[{"n": step}], metrics={"acc": step}
        )
        if directory.wait():
            os.write(report, step.to_bytes(4, "little"))


def die_before_call(number: int) -> None:
    """From here on, SIGKILL this process instead of the disk call of that number, from 0."""
    counted = iter(range(number + 1))

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted_call(*args: Any, **kwargs: Any) -> Any:
            if next(counted) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted_call

    for name in DISK_CALLS:
        setattr(os, name, counting(getattr(os, name)))


def run_saver(body: Callable[[int], None], life_s: float | None) -> tuple[int, int]:
    """Fork, run `body` there with a descriptor to report to, and kill it after `life_s` seconds; None: let it live.

    Returns the last step reported (0: none) and the signal that ended it (0: none).
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body(writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    if life_s is not None:
        time.sleep(life_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with open(reading, "rb") as reports:
        said = reports.read()
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"the saver failed with exit status {os.WEXITSTATUS(status)}")
    return int.from_bytes(said[-4:], "little"), os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def look(folder: Path) -> dict[str, Any]:
    """What a new run would find there: the step, whether all of it is of that step, and what was told."""
    told: list[str] = []
    found = CheckpointDir(folder, report=told.append).latest()
    if found is None:
        return {"step": 0, "whole": True, "told": told}
    step = found.manifest.progress.step
    whole = found.weights()["w"].eq(step).all().item() and found.state() == found.part(0) == {"n": step}
    return {"step": step, "whole": whole, "told": told}


def at_every_call(folder: Path) -> Iterator[dict[str, Any]]:
    """Savers of two further steps that die before their first, second, ... disk call, until one lives to the end."""
    number = ended_by = 0
    before = look(folder)["step"]

    while number == 0 or ended_by:

        def body(report: int, number: int = number, before: int = before) -> None:
            die_before_call(number)
            save_steps(folder, before + 1, before + 2, report)

        reported, ended_by = run_saver(body, None)
        seen = look(folder)
        yield {**seen, "before": before, "reported": reported, "ended_by": ended_by}
        number, before = number + 1, seen["step"]


def at_random_times(folder: Path, trials: int, seed: int) -> Iterator[dict[str, Any]]:
    """Savers without an end, each killed after a random time; the first step is saved in peace, to time it."""
    chance = random.Random(seed)
    since_s = time.monotonic()
    run_saver(lambda report: save_steps(folder, 1, 1, report), None)
    save_s = time.monotonic() - since_s
    for _ in range(trials):
        before = look(folder)["step"]

        def body(report: int, before: int = before) -> None:
            save_steps(folder, before + 1, before + 10_000, report)

        reported, ended_by = run_saver(body, chance.uniform(0, LONGEST_LIFE * save_s))
        yield {**look(folder), "before": before, "reported": reported, "ended_by": ended_by}


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    lines = at_every_call(target) if sys.argv[2] == "before" else at_random_times(target, *map(int, sys.argv[3:5]))
    for line in lines:
        print(json.dumps(line), flush=True)
