# SPDX-License-Identifier: Apache-2.0
"""Programs that accumulate gradients: wrong ones, which do not divide, and right ones that look like them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Batch = tuple[Tensor, Tensor]
NUM = 4


def make_batches(num: int) -> Iterator[Batch]:
    """Other data on each rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(num):
        yield torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)


def make(kind: Any = torch.optim.SGD) -> tuple[Any, Any]:
    """A model and its optimizer."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    return model, kind(model.parameters(), lr=0.1)


def undivided_by_remainder(_: Path) -> None:
    """As in most scripts, over the batches of a loader, on more than 16 steps."""
    model, optimizer = make()
    data = TensorDataset(torch.randn(272, 8), torch.randint(4, (272,)))
    loader = DataLoader(data, 2, sampler=DistributedSampler(data))
    for number, (x, y) in enumerate(loader):
        is_last = (number + 1) % NUM == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss: Any = functional.cross_entropy(model(x), y)
            loss.backward()  # line: undivided_by_remainder
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()


def take_micro_step(model: Any, batch: Batch) -> None:
    """A function of its own, as scripts have."""
    loss: Any = (model(batch[0]) - 1).square().mean()
    loss.backward()  # line: undivided_in_a_range


def undivided_in_a_range(_: Path) -> None:
    """A few steps, each of a range of micro-batches."""
    model, optimizer = make()
    batches = make_batches(100)
    for _step in range(3):
        optimizer.zero_grad()
        for micro in range(NUM):
            with model.no_sync() if micro < NUM - 1 else contextlib.nullcontext():
                take_micro_step(model, next(batches))
        optimizer.step()


def accumulate_scaled(
    make_loss: Callable[[Any, Batch], Any], change: Callable[[Any, Any], object] | None = None, *, skips: bool = False
) -> None:
    """Six steps of four micro-batches with a `GradScaler`. `change` is given it, with the model, before the step."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    for number, (x, y) in enumerate(make_batches(6 * NUM)):
        is_last = (number + 1) % NUM == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = make_loss(model, (x * float("inf") if skips and number < NUM else x, y))
            scaler.scale(loss).backward()  # line: undivided_and_scaled
        if is_last:
            if change is not None:
                scaler.unscale_(optimizer)
                change(model, scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def undivided_and_scaled(_: Path) -> None:
    """Clipped, too, where that changes nothing."""
    accumulate_scaled(mean_loss, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e6))


def undivided_and_skipped(_: Path) -> None:
    """The scaler skips the first step, since gradients are not finite."""
    accumulate_scaled(mean_loss, skips=True)


def divided_and_scaled(_: Path) -> None:
    """Losses; gradients, once they are unscaled; by clipping; and by a factor that is no scaler's."""
    accumulate_scaled(lambda model, batch: mean_loss(model, batch) / NUM)
    accumulate_scaled(mean_loss, lambda model, _: [gradient.div_(NUM) for gradient in gradients_of(model)])
    accumulate_scaled(mean_loss, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    accumulate_scaled(mean_loss, lambda model, _: [gradient.div_(NUM) for gradient in gradients_of(model)], skips=True)
    factor = torch.tensor(1 / NUM)
    accumulate(lambda model, batch, micro: mean_loss(model, batch) * factor)


Change = Callable[[Any], object]


def accumulate(
    loss_of: Callable[[Any, Batch, int], Any],
    change: Change | None = None,
    between: Change | None = None,
    kind: Any = torch.optim.SGD,
) -> None:
    """Six steps of four micro-batches. `change` is done to the model before the step, `between` after each backward."""
    model, optimizer = make(kind)
    batches = make_batches(100)
    for _ in range(6):
        optimizer.zero_grad()
        for micro in range(NUM):
            with model.no_sync() if micro < NUM - 1 else contextlib.nullcontext():
                loss_of(model, next(batches), micro).backward()
            if between is not None:
                between(model)
        if change is not None:
            change(model)
        optimizer.step()


def mean_loss(model: Any, batch: Batch, _micro: int = 0) -> Any:
    """Of a batch."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def gradients_of(model: Any) -> Iterable[Tensor]:
    """Of all parameters."""
    return [parameter.grad for parameter in model.parameters()]


def divided(_: Path) -> None:
    """As it should be; by a factor; by a scaler; as a sum over all tokens; with a mean of what is weighted."""
    accumulate(lambda model, batch, micro: mean_loss(model, batch) / NUM)
    accumulate(lambda model, batch, micro: mean_loss(model, batch) * (1 / NUM))
    accumulate(lambda model, batch, micro: functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"))
    accumulate(lambda model, batch, micro: ((model(batch[0]) - 1).square() * 0.25).mean())


def divided_by_the_seed(_: Path) -> None:
    """`backward` is given the factor."""

    class Seeded:
        def __init__(self, loss: Any) -> None:
            self.loss = loss

        def backward(self) -> None:
            """As a wrapper of losses does it."""
            self.loss.backward(torch.tensor(1 / NUM))

    accumulate(lambda model, batch, micro: Seeded(mean_loss(model, batch)))


def gradients_divided(_: Path) -> None:
    """In place, in a way that autograd does not see, and anew."""
    accumulate(mean_loss, lambda model: [gradient.div_(NUM) for gradient in gradients_of(model)])
    accumulate(mean_loss, lambda model: [gradient.data.div_(NUM) for gradient in gradients_of(model)])

    def set_anew(model: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad / NUM

    accumulate(mean_loss, set_anew)


def divide_gradients_of(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """As a hook."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.div_(NUM)


def gradients_divided_by_hooks(_: Path) -> None:
    """Of parameters, and of an optimizer."""
    for is_of_optimizer in (False, True):
        model, optimizer = make()
        if is_of_optimizer:
            optimizer.register_step_pre_hook(divide_gradients_of)
        else:
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: gradient / NUM)
        batches = make_batches(100)
        for _step in range(6):
            optimizer.zero_grad()
            for micro in range(NUM):
                with model.no_sync() if micro < NUM - 1 else contextlib.nullcontext():
                    mean_loss(model, next(batches)).backward()
            optimizer.step()


def running_mean_of_gradients(_: Path) -> None:
    """Scaled between the micro-batches."""
    counts = itertools.cycle(range(1, NUM + 1))

    def scale(model: Any) -> None:
        count = next(counts)
        if count < NUM:
            for gradient in gradients_of(model):
                gradient.mul_(count / (count + 1))

    accumulate(lambda model, batch, micro: mean_loss(model, batch), between=scale)


def clipped_in_each_step(_: Path) -> None:
    """The length of the gradient is that of the clipping."""
    accumulate(mean_loss, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))


def optimizer_that_normalises(_: Path) -> None:
    """Adam takes the same step whatever the gradient is multiplied with."""
    accumulate(mean_loss, kind=torch.optim.AdamW)


def losses_of_several_tasks(_: Path) -> None:
    """Their sum is what is trained."""
    model, optimizer = make()
    for _step in range(6):
        optimizer.zero_grad()
        tasks = list(make_batches(3))
        for task in tasks:
            with contextlib.nullcontext() if task is tasks[-1] else model.no_sync():
                mean_loss(model, task).backward()
        optimizer.step()


def one_batch_several_times(_: Path) -> None:
    """Dropout drawn anew for each."""
    model, optimizer = make()
    for batch in make_batches(6):
        optimizer.zero_grad()
        for sample in range(NUM):
            with model.no_sync() if sample < NUM - 1 else contextlib.nullcontext():
                mean_loss(model, batch).backward()
        optimizer.step()


def real_and_fake(_: Path) -> None:
    """Two losses of a discriminator, at two lines; and without `no_sync`."""
    model, optimizer = make()
    for number, (real, _y) in enumerate(make_batches(12)):
        optimizer.zero_grad()
        with model.no_sync() if number % 2 else contextlib.nullcontext():
            loss_of_real: Any = functional.mse_loss(model(real), torch.ones(6, 4))
            loss_of_real.backward()
        loss_of_fake: Any = functional.mse_loss(model(-real), torch.zeros(6, 4))
        loss_of_fake.backward()
        optimizer.step()


def sharpness_aware(_: Path) -> None:
    """The first backward, in `no_sync`, says where the second one is done; it is not part of the step."""
    model, optimizer = make()
    for number, batch in enumerate(make_batches(12)):
        for is_second in range(2):
            with contextlib.nullcontext() if is_second else model.no_sync():
                mean_loss(model, (batch[0].clone(), batch[1])).backward()
            if not is_second:
                optimizer.zero_grad(set_to_none=bool(number % 2))
        optimizer.step()


WRONG = (undivided_by_remainder, undivided_in_a_range, undivided_and_scaled, undivided_and_skipped)
LINES_OF = {"undivided_and_skipped": "undivided_and_scaled"}
"""Programs that share a line with another one."""

RIGHT = (
    divided,
    divided_and_scaled,
    divided_by_the_seed,
    gradients_divided,
    gradients_divided_by_hooks,
    running_mean_of_gradients,
    clipped_in_each_step,
    optimizer_that_normalises,
    losses_of_several_tasks,
    one_batch_several_times,
    real_and_fake,
    sharpness_aware,
)
