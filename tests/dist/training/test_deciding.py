# SPDX-License-Identifier: Apache-2.0
"""All ranks leave after the same update, whoever wanted to and why."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import RankError
from ddpilot.training.coordination import stop
from ddpilot.training.coordination.stop import MAX_INTERVAL
from ddpilot.training.loop import Loop
from tests.dist.training.bodies import launch, launch_unwatched
from tests.soak import often

ACCUMULATE = 2
NUM_TRIALS = 20 if os.environ.get("DDPILOT_SOAK") else 3


def count_batches(how: str, delays_s: list[float | None], seed: int) -> dict[str, Any]:
    """Train until told to stop in the way `how`: after a delay, on the ranks that have one.

    Updates are fast and slow by turns, and some ranks slower than others, so that the ranks talk every few updates.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    delay_s = delays_s[int(os.environ["RANK"])]
    rng = random.Random(f"{seed} {os.environ['RANK']}")
    loop = Loop(accumulate=ACCUMULATE, max_time_s=delay_s if how == "time" else None)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = loop.prepare(model, optimizer)
    loader = loop.loader(TensorDataset(torch.ones(43, 2)), global_batch_size=4)
    done: list[tuple[int, int]] = []
    asked_at: list[int] = []

    def act() -> None:
        asked_at.append(len(done))
        loop.stop() if how == "asked" else os.kill(os.getpid(), getattr(signal, how))

    timer = threading.Timer(delay_s or 0.0, act)
    for epoch in loop.epochs(10**6):
        if not done and delay_s is not None and how != "time":
            timer.start()
        for number, (x,) in enumerate(loop.batches(loader)):
            done.append((epoch, number))
            with loop.accumulate(model):
                loop.backward(model(x).pow(2).mean())
            loop.step(optimizer)
            if rng.random() < 0.05:
                time.sleep(rng.choice([0.001, 0.02]))
    restored = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers
    again = list(loop.epochs(10**6))
    return {
        "last": done[-1],
        "num": len(done),
        "reasons": loop.stop_reasons,
        "next": (loop.epoch, loop.next_batch),
        "soon": not asked_at or len(done) - asked_at[0] <= ACCUMULATE * (MAX_INTERVAL + 2),
        "restored": restored,
        "again": again,
        "weight": model.module.weight.tolist(),
    }


def check_together(results: Any, reason: str) -> None:
    """All ranks did the same batches, up to the end of an accumulation group, and know where to go on."""
    first = results[0]
    assert all(seen == first for seen in results)
    assert first["reasons"] == (reason,)
    assert first["restored"]
    assert first["soon"]
    assert first["again"] == []
    epoch, number = first["last"]
    if first["next"][1]:
        assert first["next"] == (epoch, number + 1)
        assert (number + 1) % 2 == 0 or number == 10
    else:
        assert first["next"] == (epoch + 1, 0)


@pytest.mark.soak
@pytest.mark.timeout(300)
@often("asked", "time", "SIGTERM")
@pytest.mark.parametrize("how", ["asked", "time", "SIGTERM", "SIGUSR1", "SIGINT"])
def test_all_ranks_leave_after_the_same_update(how: str) -> None:
    """One rank, or two at different moments, want to stop at a random time."""
    rng = random.Random(how)
    for trial in range(NUM_TRIALS if how == "SIGTERM" else 1):
        num_ranks = rng.choice([2, 3, 4])
        delays_s: list[float | None] = [None] * num_ranks
        for rank in rng.sample(range(num_ranks), rng.choice([1, 2])):
            delays_s[rank] = 0.02 + 0.4 * rng.random()
        check_together(launch(num_ranks, count_batches, how, delays_s, trial), how)


def stop_early(patience: int) -> Any:
    """Rank 1 alone decides that it has seen enough, between two epochs; then all do, in the middle of one."""
    loop = Loop()
    model = loop.prepare(nn.Linear(2, 1))
    loader = loop.loader(TensorDataset(torch.ones(8, 2)), global_batch_size=4)
    for epoch in loop.epochs(50):
        for (x,) in loop.batches(loader):
            loop.backward(model(x).mean())
        if loop.rank == 1 and epoch + 1 == patience:
            loop.stop()
    again = Loop()
    num_batches = 0
    for _ in again.epochs(50):
        for (x,) in again.batches(loader):
            num_batches += 1
            again.backward(model(x).mean(), count=len(x))
            if num_batches == 31:
                again.stop(everywhere=True)
    return (loop.epoch, loop.next_batch, loop.should_stop), (again.epoch, again.next_batch, num_batches)


def test_a_stop_between_epochs_or_of_all_ranks_is_exact() -> None:
    """No rank begins the next epoch, or another update."""
    assert list(launch(2, stop_early, 3)) == [((3, 0, True), (15, 1, 31))] * 2


def leave_by_break() -> None:
    """All ranks leave a loop at its second batch, which is fine; rank 1 alone leaves the next loop there."""
    stop._PATIENCE_S, stop._LIMIT_S = 1.0, 1.4
    for is_first in (True, False):
        loop = Loop()
        model = loop.prepare(nn.Linear(1, 1))
        loader = loop.loader(TensorDataset(torch.ones(12, 1)), global_batch_size=4)
        for number, (x,) in enumerate(loop.batches(loader)):
            loop.backward(model(x).mean())
            if number == 1 and (is_first or loop.rank == 1):
                break
        loop.reduce(0.0)


def test_a_rank_that_leaves_by_break_alone_is_named_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Before it meets the others in another collective, which gloo ends without an exception."""
    with pytest.raises(RankError) as caught:
        launch_unwatched(2, leave_by_break)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert "[rank 1] leaving batches() at batch 1 of epoch 0 (" in text
    assert "rank 0 did not leave there" in text
    assert "call loop.stop()" in text
    said = capfd.readouterr().err
    assert "waiting for 0 s more: [rank 1] leaving batches() at batch 1 of epoch 0 (" in said
    assert said.count("leaving batches() at") == 1
