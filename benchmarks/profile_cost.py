# SPDX-License-Identifier: Apache-2.0
"""What `ddpilot profile` adds to an update, and how exactly it recovers planted costs.

Cost: processor time of the training thread, of an update that computes next to nothing, since the cost does not grow
with what the model computes: with and without in turn, in one process. Planted costs: a sleep of 5 ms in the loader, in
the forward pass, and on one rank before the exchange of gradients, in every second update, as the profile of two ranks
has them: the median of the phase in these updates less that in the others, which see the same machine.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import ddpilot
from benchmarks.guard_data_cost import BATCH, NUM_STEPS, train
from benchmarks.measure import Row, main, render_values
from ddpilot.guard.hook import install
from ddpilot.profiler.rank.probe import PhaseProbe

LIMIT_US = 200.0
"""1 % of an update of 20 ms."""
SLEEP_MS, ERROR = 5.0, 0.15
PLANTED = {"loader": "data", "forward": "forward", "exchange": "waiting"}
"""Share of rank 0 in which a planted sleep is seen; before the exchange it sleeps on rank 1, and rank 0 waits."""
SAMPLES_OF_RANK, NUM_UPDATES = 8, 84


def measure_cost(rounds: int) -> list[tuple[float, float]]:
    """Microseconds of an update without and with, `rounds` times; in a rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(BATCH * NUM_STEPS, 192), torch.randint(0, 10, (BATCH * NUM_STEPS,)))
    pairs = []
    for _ in range(rounds + 1):
        without = train(data)
        with tempfile.TemporaryDirectory() as folder:
            make_probe = functools.partial(PhaseProbe, Path(folder), 0)
            functools.update_wrapper(make_probe, PhaseProbe, updated=())
            stop = install(Path(folder) / "journal", rank=0, probes=(make_probe,))
            pairs.append((without, train(data)))
            stop()
    dist.destroy_process_group()
    return pairs[1:]


paused_ms: list[float] = []


def pause() -> None:
    """Sleep, and keep how long that took: longer than asked for on a busy machine."""
    begin_s = time.perf_counter()
    time.sleep(SLEEP_MS / 1e3)
    paused_ms.append((time.perf_counter() - begin_s) * 1e3)


class Samples(TensorDataset):
    """Samples of which the first of each batch may take the time."""

    sleeps = False
    num_read = 0

    def __getitem__(self, index: int) -> Any:
        if self.sleeps and self.num_read % (2 * SAMPLES_OF_RANK) == SAMPLES_OF_RANK:
            pause()
        self.num_read += 1
        return super().__getitem__(index)  # type: ignore[no-untyped-call]


class Net(torch.nn.Module):
    """A layer that may take the time."""

    def __init__(self, sleeps: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self.sleeps = sleeps
        self.num_passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        if self.sleeps and self.num_passes % 2:
            pause()
        self.num_passes += 1
        return self.layer(x)  # type: ignore[no-any-return]


def profile_planted(planted: str) -> tuple[float, float]:
    """Milliseconds that rank 0 has more of the share in updates with the planted sleep, and of this rank's sleeps."""
    torch.set_num_threads(1)
    loop = ddpilot.Loop(seed=0, progress=False)
    model: Any = Net(planted == "forward")
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    num = NUM_UPDATES * SAMPLES_OF_RANK * loop.world_size
    data = Samples(torch.randn(num, 8), torch.randint(2, (num,)))
    data.sleeps = planted == "loader"
    with loop.profile() as profile:
        for number, (x, y) in enumerate(loop.batches(loop.loader(data, batch_size_per_rank=SAMPLES_OF_RANK))):
            with loop.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                if planted == "exchange" and loop.rank == 1 and number % 2:
                    pause()
                loop.backward(loss)
            loop.step(optimizer)
    phases = profile.profile.phases
    seconds = phases.share(PLANTED[planted])[0]
    first = phases.first_update - 1  # counted from 0, as `number`
    with_it, without = seconds[(first + 1) % 2 :: 2], seconds[first % 2 :: 2]
    more_ms = 1e3 * (statistics.median(with_it) - statistics.median(without))
    return more_ms, statistics.median(paused_ms or [0.0])


def measure(rounds: int) -> list[Row]:
    """The bars."""
    costs = ddpilot.Launcher(nproc_per_node=1, watch=False).run(measure_cost, rounds)[0]
    added = [with_it - without for without, with_it in costs]
    rows = [
        Row(
            what="one update, profiled",
            ours=render_values([with_it for _, with_it in costs], "us"),
            peer=f"without: {render_values([without for without, _ in costs], 'us')}",
            ratio=f"+{render_values(added, 'us')}",
            bar=f"+{LIMIT_US:.0f} us",
            holds=statistics.median(added) <= LIMIT_US,
        )
    ]
    launcher = ddpilot.Launcher(nproc_per_node=2, watch=False)
    for planted, share in PLANTED.items():
        ratios = []
        for _ in range(3):
            found = launcher.run(profile_planted, planted)
            ratios.append(found[0][0] / found[1][1])  # rank 1 sleeps in all cases
        rows.append(
            Row(
                what=f"a sleep of {SLEEP_MS:g} ms planted in the {planted}, as `{share}` of rank 0",
                ours=", ".join(f"{ratio:.2f}" for ratio in ratios),
                peer="",
                ratio=f"{statistics.median(ratios):.2f} of the sleep",
                bar=f"within {ERROR:.0%}",
                holds=abs(statistics.median(ratios) - 1) <= ERROR,
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, rounds=11))
