# SPDX-License-Identifier: Apache-2.0
"""Training on files of samples has the numbers of plain PyTorch at any number of ranks, also resumed at another one."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpilot
from tests.preload import BESIDES_TRAINER, PRELOAD

BATCH_SIZE, NUM_LANES, NUM_UPDATES, STOP = 7, 3, 19, 5
LENGTHS = [20, 3, 0, 31, 9]
same = torch.testing.assert_close


def make_model() -> nn.Module:
    """The same weights every time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make_sample(value: dict[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a line: a point and its target."""
    x = torch.tensor([value["a"], value["b"]], dtype=torch.float64)
    return x, x.prod().reshape(1)


def make_rows() -> list[list[dict[str, float]]]:
    """The samples of each file."""
    numbers = itertools.count()
    return [[{"a": n / 50, "b": (n % 7) / 3} for n in itertools.islice(numbers, length)] for length in LENGTHS]


def write_files(folder: Path) -> None:
    """Files of JSON lines, one of them compressed."""
    for number, rows in enumerate(make_rows()):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if number == 3:
            (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"{number}.jsonl").write_text(text)


def train_by_hand() -> tuple[list[float], torch.Tensor]:
    """Plain PyTorch: one sample of each lane after the other, without those that have ended."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    while len(losses) < NUM_UPDATES:
        rows = make_rows()
        lanes = [[row for shard in rows[lane::NUM_LANES] for row in shard] for lane in range(NUM_LANES)]
        turns = itertools.zip_longest(*lanes)
        order = [make_sample(row) for turn in turns for row in turn if row is not None]
        for start in range(0, len(order), BATCH_SIZE):
            x, y = (torch.stack(column) for column in zip(*order[start : start + BATCH_SIZE], strict=True))
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == NUM_UPDATES:
                break
    return losses, nn.utils.parameters_to_vector(model.parameters()).detach()


def train(folder: Path, checkpoint_dir: Path | None, num_updates: int, num_workers: int) -> dict[int, float] | Any:
    """The loss of each update that this run made, and the weights after it."""
    loop = ddpilot.Loop(checkpoint_dir=checkpoint_dir, progress=False)
    model = make_model()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = ddpilot.JsonLinesShards(folder / "*.jsonl*", transform=make_sample)
    loader = loop.loader(data, global_batch_size=BATCH_SIZE, num_lanes=NUM_LANES, num_workers=num_workers)
    losses = {}
    for _ in loop.epochs(max_updates=num_updates):
        for x, y in loop.batches(loader):
            loss = nn.functional.mse_loss(model(x), y)
            loop.backward(loss)
            loop.step(optimizer)
            losses[loop.num_updates] = loop.reduce(loss).item()
    error = loop.evaluate(model, loader, {"error": lambda output, y: (output - y).abs()})["error"]
    return losses, nn.utils.parameters_to_vector(ddpilot.unwrap(model).parameters()).detach(), error


def launch(num_ranks: int, *args: Any) -> Any:
    """What rank 0 returns, and all ranks alike."""
    found = list(ddpilot.Launcher(nproc_per_node=num_ranks, timeout_s=100, preload=PRELOAD).run(train, *args))
    for losses, weights, error in found[1:]:
        assert (losses, error) == (found[0][0], found[0][2])
        same(weights, found[0][1], rtol=0, atol=0)
    return found[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files."""
    path = tmp_path_factory.mktemp("files")
    write_files(path)
    return path


@pytest.fixture(scope="module")
def by_hand() -> tuple[list[float], torch.Tensor]:
    """What one process makes of the files, in plain PyTorch."""
    launcher = ddpilot.Launcher(nproc_per_node=1, timeout_s=100, preload=PRELOAD)
    return launcher.run(train_by_hand)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("ranks", "num_workers"), [((1, 3), 0), ((3, 2), 2), ((2, 1), 0)])
def test_resumed_run_has_the_numbers_of_one_process(
    folder: Path,
    by_hand: tuple[list[float], torch.Tensor],
    tmp_path: Path,
    ranks: tuple[int, int],
    num_workers: int,
) -> None:
    """Two epochs, stopped within the first and continued at another number of ranks; lengths are unknown."""
    losses, weights = by_hand
    before, *_ = launch(ranks[0], folder, tmp_path, STOP, num_workers)
    after, own_weights, error = launch(ranks[1], folder, tmp_path, NUM_UPDATES, num_workers)
    assert [*before, *after] == list(range(1, NUM_UPDATES + 1))
    same([*before.values(), *after.values()], losses, rtol=1e-10, atol=1e-13)
    same(own_weights, weights, rtol=1e-10, atol=1e-13)
    model = make_model()
    nn.utils.vector_to_parameters(weights, model.parameters())
    x, y = (
        torch.stack(column) for column in zip(*(make_sample(row) for one in make_rows() for row in one), strict=True)
    )
    assert error == pytest.approx((model(x) - y).abs().mean().item(), rel=1e-10)


def test_trainer_reads_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shuffled, on three ranks as on one, with a validation set of shards."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch's optimizers would set it
    found = []
    for num_ranks in (1, 3):
        data = ddpilot.JsonLinesShards(folder / "*.jsonl*", transform=make_sample)
        trainer = ddpilot.Trainer(
            make_model(),
            nn.functional.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            launcher=ddpilot.Launcher(timeout_s=100, preload=BESIDES_TRAINER),
        )
        history = trainer.fit(
            data, data, epochs=2, global_batch_size=BATCH_SIZE, nproc_per_node=num_ranks, progress=False
        )
        found.append([[row["loss"], row["val_loss"]] for row in history.epochs])
    same(found[0], found[1], rtol=1e-10, atol=1e-13)
