# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the tests of training on the emulated accelerator run; most of it runs on the CPU too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.same_training import train_with_loop
from benchmarks.small_models import make_data, make_model
from ddpilot.data.nested import to_host
from ddpilot.errors import LoopError, NonFiniteError, OutOfMemoryError
from ddpilot.training.batch_size import find_batch_size
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap

KINDS = ("mlp", "cnn", "gpt")
SHARES = {2: [2.0, 1.0]}
WARM_UP = 5
ROW = 1 << 18
"""Numbers of four bytes that `wide_step` makes of each sample: 1 MiB."""


def emu() -> Any:
    """The module of the device."""
    return torch.get_device_module("emu")


def flat(model: nn.Module) -> torch.Tensor:
    """All weights in a row."""
    return torch.cat([weight.detach().reshape(-1) for weight in unwrap(model).parameters()])


def train_kinds() -> dict[str, Any]:
    """An epoch of each kind of model in float64, with ragged batches, unequal shares, accumulation and clipping."""
    torch.set_default_dtype(torch.float64)
    return {kind: to_host(dict(train_with_loop(kind, 1, batch_split=SHARES))) for kind in KINDS}


def count_syncs(kind: str, num_steps: int, **options: Any) -> tuple[dict[str, int], float]:
    """The host's waits in so many steps after the first ones, by kind; and the last loss."""
    loop = Loop(seed=1, progress=True, **options)
    model = make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer = loop.prepare(model, optimizer)
    data = make_data(kind, 8 * (num_steps + WARM_UP + 2))
    loader = loop.loader(data, global_batch_size=8, pin_memory=True)
    counted: dict[str, int] = {}
    for number, (x, y) in enumerate(loop.batches(loader)):
        if number == WARM_UP:
            emu().reset_host_syncs()
        if number == WARM_UP + num_steps:
            counted = emu().host_syncs()
        with loop.accumulate(model):
            loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten().clamp(min=0))
            loop.backward(loss)
        loop.clip_grad_norm_(model.parameters(), 1.0)
        loop.step(optimizer, schedule)
        loop.reduce(loss)
        loop.reduce(0.5, "max")
    return {kind: num for kind, num in counted.items() if num}, loss.item()


def count_all_syncs() -> dict[str, Any]:
    """Of a plain loop, of a transformer, and with accumulation."""
    return {
        "plain": count_syncs("mlp", 12)[0],
        "gpt": count_syncs("gpt", 4)[0],
        "accumulated": count_syncs("mlp", 10, accumulate=2)[0],
    }


def train_over_nan(clips: bool) -> dict[str, Any]:
    """Training that continues after rank 1's loss is NaN once: what was raised where, and how far weights moved."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=1, progress=False)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0)
    model, optimizer = loop.prepare(model, optimizer)
    loader = loop.loader(TensorDataset(torch.arange(200.0).reshape(100, 2) / 100), global_batch_size=2)
    raised, moved = [], []
    for number, (x,) in enumerate(loop.batches(loader)):
        before = flat(model).clone()
        try:
            with loop.accumulate(model):
                loss = model(x).square().mean()
                loop.backward(loss * math.nan if number == 20 and loop.rank == 1 else loss)
            if clips:
                loop.clip_grad_norm_(model.parameters(), 1.0)
            loop.step(optimizer)
        except NonFiniteError as error:
            raised.append((number, error.found, error.rank))
        moved.append((flat(model) - before).abs().sum().item())
    return {"raised": raised, "moved": moved, "weights": flat(model).tolist()}


def train_over_each_nan() -> list[dict[str, Any]]:
    """Clipped and not."""
    return [train_over_nan(clips) for clips in (False, True)]


def train_on_ignored_targets() -> tuple[int, str]:
    """How many batches of eight were trained on until a loss without its count was refused, and the error."""
    loop = Loop(progress=False)
    model = nn.Linear(2, 3)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    targets = torch.tensor([0, 1, -100, 2]).repeat(8)
    num = 0
    try:
        for x, y in loop.batches(loop.loader(TensorDataset(torch.ones(32, 2), targets), global_batch_size=4)):
            loop.backward(nn.functional.cross_entropy(model(x), y))
            loop.step(optimizer)
            num += 1
    except LoopError as error:
        return num, str(error)
    return num, ""


def train_and_resume(folder: Path) -> tuple[list[float], list[float]]:
    """The weights of two epochs in one run, and of two runs of one epoch each; dropout draws on the device."""
    torch.set_default_dtype(torch.float64)

    def train(num_epochs: int, where: Path) -> list[float]:
        loop = Loop(seed=3, checkpoint_dir=where, progress=False, save_every_updates=4)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.4), nn.Linear(16, 5))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        model, optimizer = loop.prepare(model, optimizer)
        loader = loop.loader(make_data("mlp"), global_batch_size=12, shuffle=True)
        for _ in loop.epochs(num_epochs):
            for x, y in loop.batches(loader):
                with loop.accumulate(model):
                    loop.backward(nn.functional.cross_entropy(model(x), y))
                loop.step(optimizer)
        return [value for weight in model.parameters() for value in weight.flatten().tolist()]

    whole = train(2, folder / "whole")
    train(1, folder / "parts")
    return whole, train(2, folder / "parts")


def wide_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss with large activations."""
    return torch.as_tensor(model(batch[0]).expand(-1, ROW).square().mean())


def run_out_of_memory() -> dict[str, Any]:
    """A search for the batch size in little memory, and a training step beyond it."""
    loop = Loop(seed=1, progress=False)
    model = nn.Linear(2, 1)
    model, optimizer = loop.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(4000, 2))
    before = [weight.detach().cpu() for weight in model.parameters()], emu().get_rng_state()
    emu().set_memory_limit((64 if loop.rank == 1 else 512) << 20)
    found = find_batch_size(loop, model, optimizer, data, wide_step, max_per_rank=256)
    same = all(torch.equal(new.cpu(), old) for new, old in zip(model.parameters(), before[0], strict=True))
    said = ""
    try:
        with loop.accumulate(unwrap(model)):
            wide_step(unwrap(model), (torch.ones(600, 2, device=loop.device),))
    except OutOfMemoryError as error:
        said = str(error)
    emu().set_memory_limit(0)
    return {
        "largest": found.largest,
        "failed": sorted({rank for trial in found.trials for rank in trial.failed_ranks}),
        "peaks": [trial.peak_bytes for trial in found.trials],
        "same": same and torch.equal(emu().get_rng_state(), before[1]),
        "said": said,
    }


def train_in_fp16() -> dict[str, Any]:
    """Updates in fp16 of which the first overflow: which were made, and the weights."""
    loop = Loop(seed=1, precision="fp16", progress=False)
    assert loop._precision.scaler is not None
    loop._precision.scaler._init_scale = 2.0**20
    model, optimizer = loop.prepare(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    loader = loop.loader(TensorDataset(torch.full((16, 2), 0.5)), global_batch_size=2)
    done = []
    for (x,) in loop.batches(loader):
        with loop.accumulate(model):
            loop.backward(model(x).float().square().mean())
        done.append(loop.step(optimizer))
    return {"done": done, "weights": flat(model).tolist()}
