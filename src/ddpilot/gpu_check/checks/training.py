# SPDX-License-Identifier: Apache-2.0
"""Check `Loop` on the accelerator: the CPU's results, resume, checkpoints, fp16, empty ranks, waits."""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot.errors import NonFiniteError, OutOfMemoryError
from ddpilot.gpu_check.catalogue import Answer, CannotBeShownError, Outcome, judge, judge_answers
from ddpilot.gpu_check.checks.accelerator import (
    LAUNCH_LIMIT_S,
    accelerator_kind,
    count_devices,
    first_device,
    require_function,
    run_ranks,
    wait_for,
)
from ddpilot.group.protocol import FakeGroup
from ddpilot.launcher import Launcher
from ddpilot.trainer.trainer import Trainer
from ddpilot.training.loop import Loop

_TOLERANCE = 1e-10
_NUM_SAMPLES, _BATCH = 65, 16
"""The last batch has one sample, so that one of two ranks has none."""

Numbers = tuple[str, list[float], list[torch.Tensor]]
"""The device, the norm of all gradients at each update, and the final weights."""


def loop_has_the_cpus_numbers() -> Outcome:
    """A CNN, an MLP and a small GPT in float64 on one rank have the CPU's gradient norms and weights."""
    return _compare_with_cpu(1)


def loop_of_two_has_the_cpus_numbers() -> Outcome:
    """The same models on two ranks, which share the device if there is only one, have the CPU's norms and weights."""
    return _compare_with_cpu(2)


def _compare_with_cpu(num_ranks: int) -> Outcome:
    torch.set_num_threads(1)
    wanted = {name: train_in_float64(name, FakeGroup(device=torch.device("cpu"))) for name in MODELS}
    ranks = list(run_ranks(_train_all, num_ranks=num_ranks, env={"OMP_NUM_THREADS": "1"}))
    worst: dict[str, float] = {}
    for name, (_, norms, weights) in wanted.items():
        for results in ranks:
            _, found_norms, found_weights = results[name]
            pairs = zip(_join(norms, weights), _join(found_norms, found_weights), strict=True)
            worst[name] = max([worst.get(name, 0.0), *(_relative(ours, found) for ours, found in pairs)])
    where = sorted({results[name][0] for results in ranks for name in results})
    evidence = f"{num_ranks} ranks, {', '.join(where)}: largest relative difference " + ", ".join(
        f"{name} {value:.1e}" for name, value in worst.items()
    )
    return judge(all(value < _TOLERANCE for value in worst.values()), evidence)


def _join(norms: list[float], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.tensor(norms, dtype=torch.float64), *weights]


def _relative(wanted: torch.Tensor, found: torch.Tensor) -> float:
    if wanted.shape != found.shape or not bool(torch.isfinite(found).all()):
        return math.inf
    return float((wanted - found).abs().max() / wanted.abs().max().clamp(min=1e-12))


def _train_all() -> dict[str, Numbers]:
    return {name: train_in_float64(name) for name in MODELS}


class _Gpt(nn.Module):
    """One block of causal attention over 12 tokens from a vocabulary of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.flatten(1)[:, :12].abs() * 8).long() % 16
        mask = torch.ones(12, 12, dtype=torch.bool, device=x.device).triu(1)
        return torch.as_tensor(self.head(self.block(self.embedding(tokens), src_mask=mask).mean(1)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "CNN": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 1)),
    "MLP": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1)),
    "GPT": _Gpt,
}
"""Each takes images of shape (1, 8, 8) and returns one number per image."""


def train_in_float64(name: str, group: Any = None) -> Numbers:
    """Train three epochs with momentum, clipping and an uneven last batch; equal results at any number of ranks."""
    loop = Loop(group=group, seed=1, progress=False)
    torch.manual_seed(3)
    net = MODELS[name]().double()
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(_NUM_SAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64)
    data = TensorDataset(images, images.mean((1, 2, 3)).unsqueeze(1))
    model = loop.prepare(net)
    optimizer = loop.prepare(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = loop.loader(data, global_batch_size=_BATCH)
    norms = []
    for _ in loop.epochs(3):
        for x, y in loop.batches(loader):
            with loop.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                loop.backward(loss)
            norms.append(loop.clip_grad_norm_(model.parameters(), 1.0))
            loop.step(optimizer)
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return str(loop.device), [norm.item() for norm in norms if norm is not None], weights


def trainer_of_two_has_the_cpus_numbers() -> Outcome:
    """A fit of `Trainer` on two ranks, each on its accelerator, gives the weights of a plain loop on the CPU."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    plain = copy.deepcopy(net)
    x = torch.randn(4 * _BATCH, 8, dtype=torch.float64)
    y = x.prod(1, keepdim=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for rows, targets in zip(torch.split(x, _BATCH), torch.split(y, _BATCH), strict=True):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(plain(rows), targets))
        optimizer.step()
    launcher = Launcher(timeout_s=LAUNCH_LIMIT_S)
    trainer = Trainer(net, nn.functional.mse_loss, lambda own: torch.optim.SGD(own, lr=0.05), launcher=launcher)
    options: dict[str, Any] = {"epochs": 1, "global_batch_size": _BATCH, "shuffle": False, "progress": False}
    trainer.fit(TensorDataset(x, y), nproc_per_node=2, **options)
    pairs = zip(plain.parameters(), trainer.model.parameters(), strict=True)
    worst = max(_relative(ours.detach(), found.detach().cpu()) for ours, found in pairs)
    return judge(worst < _TOLERANCE, f"4 updates on 2 ranks: largest relative difference {worst:.1e}")


def fused_optimizer_trains() -> Outcome:
    """A fused optimizer under bf16 reduces the loss, with a last batch that leaves a rank without samples."""
    num_ranks = max(1, min(2, count_devices()))
    answers = run_ranks(_train_fused, num_ranks=num_ranks)
    evidence = "; ".join(f"{device}: loss {first:.3g} to {last:.3g}" for device, first, last in answers)
    return judge(all(last < first / 2 for _, first, last in answers), evidence)


def _train_fused() -> tuple[str, float, float]:
    is_known = first_device().type in ("cuda", "cpu")  # has autocast and fused kernels
    loop = Loop(seed=1, progress=False, precision="bf16" if is_known else "fp32")
    torch.manual_seed(1)
    net = loop.prepare(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = loop.prepare(torch.optim.AdamW(net.parameters(), lr=1e-2, fused=is_known))
    x = torch.randn(_NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(2))
    loader = loop.loader(TensorDataset(x, x.sum(1, keepdim=True)), global_batch_size=_BATCH)
    means = []
    for _ in loop.epochs(12):
        total = 0.0
        for a, b in loop.batches(loader):
            with loop.accumulate(net):
                loss = nn.functional.mse_loss(net(a).float(), b)
                loop.backward(loss)
            loop.step(optimizer)
            total += float(loss) if len(a) else 0.0
        means.append(total)
    return str(loop.device), means[0], means[-1]


def fp16_two_optimizers() -> Outcome:
    """With fp16 two optimizers step on the gradients of one backward, clipped or not, as in torch's recipe."""
    found = {clips: _step_two(clips) for clips in (False, True)}
    # Without clipping both move by the learning rate 0.1; with it, by the rate divided by the norm of both, sqrt(2).
    wanted = {False: 0.9, True: 1 - 0.1 / math.sqrt(2)}
    holds = all(abs(value - wanted[clips]) < 1e-3 for clips, values in found.items() for value in values)
    return judge(holds, f"weights of both without clipping {found[False]}, with it {found[True]}; wanted {wanted}")


class _TwoNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.a + self.b)


def _step_two(clips: bool) -> list[float]:
    loop = Loop(group=FakeGroup(device=first_device()), precision="fp16", progress=False)
    net = loop.prepare(_TwoNumbers())
    optimizers = [loop.prepare(torch.optim.SGD([each], lr=0.1)) for each in net.parameters()]
    loader = loop.loader(TensorDataset(torch.ones(2, 1)), global_batch_size=2)
    for (x,) in loop.batches(loader):
        with loop.accumulate(net):
            loop.backward(net(x).float().mean())
        if clips:
            loop.clip_grad_norm_(net.parameters(), 1.0)
        for optimizer in optimizers:
            loop.step(optimizer)
    return [round(each.item(), 4) for each in net.parameters()]


def waits_of_a_step() -> Outcome:
    """A step of Loop synchronizes the host at most once with fp16, in GradScaler, and never without it."""
    found = {precision: _count_waits(precision) for precision in ("fp32", "bf16", "fp16")}
    evidence = "; ".join(f"{name}: {len(texts)} {sorted(set(texts))}" for name, texts in found.items())
    return judge(not found["fp32"] and not found["bf16"] and len(found["fp16"]) <= 1, evidence)


def _count_waits(precision: Any) -> list[str]:
    loop = Loop(group=FakeGroup(device=first_device()), precision=precision, progress=False)
    net = loop.prepare(nn.Linear(64, 1))
    optimizer = loop.prepare(torch.optim.SGD(net.parameters(), lr=1e-3))
    found: list[str] = []
    loader = loop.loader(TensorDataset(torch.randn(40, 64)), global_batch_size=8)
    for number, (x,) in enumerate(loop.batches(loader)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if number == 3 else "default")
            try:
                with loop.accumulate(net):
                    loop.backward(net(x).square().mean())
                loop.step(optimizer)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if number == 3:
            places = [f"{each.filename.rpartition('/')[2]}:{each.lineno}" for each in seen]
            texts = [str(each.message) for each in seen]
            found = [place for place, text in zip(places, texts, strict=True) if "called a synchronizing" in text]
    return found


def stand_in_keeps_the_context() -> Outcome:
    """A model that rejects zero rows is run on dummy rows whose indices are valid for any embedding table."""
    from ddpilot.training.step.empty_batch import EmptyBatchForward

    class Net(nn.Embedding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not len(x):
                raise ValueError("no rows")
            return super().forward(x)

    device = first_device()
    model = Net(1, 4).to(device)
    EmptyBatchForward().begin([model])
    given = model(torch.zeros(0, dtype=torch.long, device=device))
    wait_for(device)
    total = torch.ones(3, device=device).sum().item()
    return judge(tuple(given.shape) == (0, 4) and total == 3, f"gave {tuple(given.shape)}; the device computes {total}")


def nan_stops_before_a_checkpoint() -> Outcome:
    """A NaN loss raises NonFiniteError, at once or at the next step, and the newest checkpoint precedes it."""
    with tempfile.TemporaryDirectory() as folder:
        ((raised_at, is_finite),) = run_ranks(_train_to_nan, folder, num_ranks=1)
    evidence = (
        f"NaN in update 3, NonFiniteError in update {raised_at}; the checkpoint's weights are finite: {is_finite}"
    )
    return judge(raised_at in (3, 4) and is_finite, evidence)


def _train_to_nan(folder: str) -> tuple[int, bool]:
    loop = Loop(checkpoint_dir=folder, progress=False)
    net = loop.prepare(nn.Linear(4, 1))
    optimizer = loop.prepare(torch.optim.SGD(net.parameters(), lr=1e-3))
    loader = loop.loader(TensorDataset(torch.randn(64, 4)), global_batch_size=8)
    number = 0
    try:
        for _ in loop.epochs(1):
            for (x,) in loop.batches(loader):
                number += 1
                with loop.accumulate(net):
                    loss = net(x).square().mean()
                    loop.backward(loss * float("nan") if number == 3 else loss)
                loop.step(optimizer)
                loop.save()
    except NonFiniteError:
        again = Loop(checkpoint_dir=folder, progress=False)
        net = again.prepare(nn.Linear(4, 1))
        again.prepare(torch.optim.SGD(net.parameters(), lr=1e-3))
        again.resume()
        return number, all(bool(torch.isfinite(each).all()) for each in net.parameters())
    return 0, False


def capture_under_guard() -> Outcome:
    """A CUDA graph of forward and backward can be captured while the rank is recorded and guarded."""
    return judge_answers(run_ranks(_capture, num_ranks=1))


def _capture() -> Answer:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    net = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(8, 64, device=device)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            net(x).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = net(x).square().mean()
        loss.backward()
    losses = []
    for _ in range(4):
        graph.replay()
        losses.append(loss.item())
        optimizer.step()
    falls = all(after < before for before, after in pairwise(losses))
    return falls, f"losses of 4 replays: {', '.join(f'{each:.5g}' for each in losses)}"


def out_of_memory_is_explained() -> Outcome:
    """When device memory runs out in a Loop, OutOfMemoryError states sizes, and memory is free afterwards."""
    device = first_device()
    limit = require_function(torch.get_device_module(device), "set_per_process_memory_fraction", "which limits memory")
    total = torch.get_device_module(device).get_device_properties(device).total_memory
    limit(min(1.0, (1 << 30) / total), device)
    loop = Loop(group=FakeGroup(device=device), progress=False)
    net = loop.prepare(nn.Linear(1 << 10, 1))
    optimizer = loop.prepare(torch.optim.SGD(net.parameters(), lr=1e-3))
    loader = loop.loader(TensorDataset(torch.ones(4, 1 << 10)), global_batch_size=2)
    text = ""
    try:
        for (x,) in loop.batches(loader):
            with loop.accumulate(net):
                loop.backward(net(x.repeat(1 << 19, 1)).mean())
            loop.step(optimizer)
    except OutOfMemoryError as error:
        text = " ".join(str(error).split())
    kept = torch.get_device_module(device).memory_allocated(device)
    fits = torch.ones(1 << 27, device=device).sum().item()
    evidence = (
        f"{text[:300] or 'no OutOfMemoryError'}; {kept / 1e6:.0f} MB held after it, 512 MB fit: {fits == 1 << 27}"
    )
    return judge(bool(text) and kept < 1 << 28 and fits == 1 << 27, evidence)


def resume_continues_exactly() -> Outcome:
    """A run interrupted and resumed on the accelerator has the weights of an uninterrupted one, dropout included."""
    if accelerator_kind() == "cpu":
        raise CannotBeShownError("no accelerator, whose random state is a separate one")
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as cut:
        (wanted,) = run_ranks(_train_with_dropout, whole, 3, num_ranks=1)
        run_ranks(_train_with_dropout, cut, 1, num_ranks=1)
        (found,) = run_ranks(_train_with_dropout, cut, 3, num_ranks=1)
    same = all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    worst = max(_relative(one, other) for one, other in zip(wanted, found, strict=True))
    return judge(same, f"weights equal bit for bit: {same}; largest relative difference {worst:.1e}")


def _train_with_dropout(folder: str, num_epochs: int) -> list[torch.Tensor]:
    loop = Loop(seed=1, checkpoint_dir=folder, progress=False)
    torch.manual_seed(1)
    net = loop.prepare(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 1)))
    optimizer = loop.prepare(torch.optim.AdamW(net.parameters(), lr=1e-2))
    x = torch.randn(_NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(2))
    loader = loop.loader(TensorDataset(x, x.sum(1, keepdim=True)), global_batch_size=_BATCH)
    for _ in loop.epochs(num_epochs):
        for a, b in loop.batches(loader):
            with loop.accumulate(net):
                loop.backward(nn.functional.mse_loss(net(a), b))
            loop.step(optimizer)
    return [parameter.detach().cpu() for parameter in net.parameters()]


_NUM_TENSORS, _TENSOR_BYTES = 40, 10_000_000
_NUM_SAVES = 5
_STALL_BAR = 0.2
_NUM_STEPS = 6


def checkpoint_stall() -> Outcome:
    """While 400 MB are saved from the device, training stops for at most a fifth of the time of torch.save."""
    device = first_device()
    tensors = [torch.full((_TENSOR_BYTES // 4,), float(number), device=device) for number in range(_NUM_TENSORS)]
    model = nn.ParameterList([nn.Parameter(values, requires_grad=False) for values in tensors])
    with tempfile.TemporaryDirectory() as name:
        loop = Loop(group=FakeGroup(device=device), checkpoint_dir=Path(name) / "ours", keep=1, progress=False)
        loop.track(model=model)
        loader = loop.loader(TensorDataset(torch.ones(100, 1)), global_batch_size=1)
        batches = loop.batches(loader)
        next(batches)
        next(batches)  # after the first update, when memory is reserved
        ours, theirs = [], []
        for number in range(_NUM_SAVES + 1):
            wait_for(device)
            loop.save()
            ours.append(_seconds_of_next(batches))
            loop._checkpointer.wait()
            theirs.append(_seconds_of_torch(model, Path(name) / f"{number}.pt"))
        del batches
    first, later, peer = ours[0], statistics.median(ours[1:]), statistics.median(theirs)
    evidence = (
        f"first save {first * 1e3:.0f} ms, later ones {later * 1e3:.0f} ms, torch.save {peer * 1e3:.0f} ms; "
        f"ratio {later / peer:.3f}, bar {_STALL_BAR}"
    )
    return judge(later / peer <= _STALL_BAR, evidence)


def _seconds_of_next(batches: Iterator[Any]) -> float:
    began = time.perf_counter()
    next(batches)
    return time.perf_counter() - began


def _seconds_of_torch(model: nn.Module, path: Path) -> float:
    began = time.perf_counter()
    torch.save(model.state_dict(), path)
    took_s = time.perf_counter() - began
    path.unlink()
    return took_s


def checkpoint_is_of_its_moment() -> Outcome:
    """The values loaded are those at the save, although the next updates ran immediately."""
    return _save_while_training([first_device()])


def checkpoint_of_two_devices() -> Outcome:
    """The values loaded are those at the save, for a model whose layers are on two devices."""
    kind = accelerator_kind()
    if count_devices() < 2:
        raise CannotBeShownError(f"needs 2 devices, {count_devices() or 'none'} here")
    return _save_while_training([torch.device(kind, 0), torch.device(kind, 1)])


def _save_while_training(devices: list[torch.device]) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        loop = Loop(group=FakeGroup(device=devices[0]), checkpoint_dir=name, progress=False)
        model = _make_counters(devices)
        loop.track(model=model)
        loader = loop.loader(TensorDataset(torch.ones(_NUM_STEPS + 1, 1)), global_batch_size=1)
        for number, _ in enumerate(loop.batches(loader)):
            with torch.no_grad():
                for each in model:
                    each.fill_(number)
            if number == _NUM_STEPS - 2:
                loop.save()
        loop._checkpointer.wait()
        again = Loop(group=FakeGroup(device=devices[0]), checkpoint_dir=name, progress=False)
        loaded = _make_counters(devices)
        again.track(model=loaded)
        is_there = again.resume()
        found = sorted({value for each in loaded for value in each.unique().tolist()})
    evidence = f"on {', '.join(map(str, devices))}: saved at {_NUM_STEPS - 2}, loaded {found}; resumed: {is_there}"
    return judge(is_there and found == [_NUM_STEPS - 2], evidence)


def _make_counters(devices: list[torch.device]) -> nn.ParameterList:
    values = [torch.full((8_000_000,), -1.0, device=device) for device in devices for _ in range(4)]
    return nn.ParameterList([nn.Parameter(each, requires_grad=False) for each in values])
