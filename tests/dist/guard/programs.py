# SPDX-License-Identifier: Apache-2.0
"""Programs as users write them: wrong ones, and correct ones that look alike."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

from ddpilot.guard.hook import install
from ddpilot.guard.probes.parameters.fingerprint import Fingerprinter, PendingFingerprint
from ddpilot.module_names import GUARD_PROBES
from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.hook import journal_path, ring_path

Program = Callable[[], object]
NUM_STEPS = 4


def run_programs(folder: str, names: list[str]) -> tuple[list[str], tuple[list[str], bool]]:
    """Run the programs called `names` one after the other, each with a journal and a ring of its own in `folder`.

    Returns what guard and the recording said of themselves, and what `train_with_faults` returns.
    """
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    said: list[str] = []
    for name in names:
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        torch.manual_seed(0)
        with start_recording(ring_path(place, rank), rank=rank, report=said.append):
            stop = install(journal_path(place, rank), rank=rank, probes=GUARD_PROBES, report=said.append)
            try:
                ALL[name]()
            finally:
                stop()
    with_faults = train_with_faults(folder)
    dist.destroy_process_group()
    return said, with_faults


def train_with_faults(folder: str) -> tuple[list[str], bool]:
    """What a probe says that breaks in the third check, and whether training ends with the very numbers of without."""
    rank = dist.get_rank()
    weights = []
    said: list[str] = []
    for is_guarded in (False, True):
        torch.manual_seed(0)
        stop = install(Path(folder) / f"faults{rank}", rank=rank, probes=GUARD_PROBES, report=said.append)
        if not is_guarded:
            stop()
        with broken_after(2) if is_guarded else contextlib.nullcontext():
            model, optimizer = make()
            train(model, optimizer, 8)
        stop()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    return said, all(torch.equal(first, second) for first, second in zip(*weights, strict=True))


@contextlib.contextmanager
def broken_after(num: int) -> Iterator[None]:
    """Fingerprints fail after `num` of them."""
    original, calls = Fingerprinter.begin, itertools.count()

    def begin(*args: Any, **kwargs: Any) -> PendingFingerprint:
        if next(calls) >= num:
            raise RuntimeError("a mistake of ours")
        return original(*args, **kwargs)

    setattr(Fingerprinter, "begin", begin)  # noqa: B010 - mypy refuses the plain assignment
    try:
        yield
    finally:
        setattr(Fingerprinter, "begin", original)  # noqa: B010


def make_model() -> nn.Module:
    """The same on all ranks."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def make_batches(num: int = NUM_STEPS) -> Iterator[Tensor]:
    """Other data on each rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(num):
        yield torch.randn(6, 8, generator=generator)


def loss_of(output: Tensor) -> Any:
    """Something to learn."""
    return (output - 1).square().mean()


def make(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A DDP model and its optimizer."""
    model = DistributedDataParallel(make_model(), **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, optimizer: torch.optim.Optimizer, num: int = NUM_STEPS) -> None:
    """The loop that everybody writes."""
    for batch in make_batches(num):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()


# Wrong ones


def closure_within_no_sync() -> None:
    """All of an update's backwards run in the closure, each in no_sync."""
    model, optimizer = make()
    batches: list[Tensor] = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = None
        for batch in batches:
            with model.no_sync():
                loss = loss_of(model(batch))
                loss.backward()
        return loss

    data = make_batches(40)
    for _ in range(20):
        batches[:] = next(data), next(data)
        optimizer.step(closure)  # line: closure_within_no_sync


def bypass_by_module() -> None:
    """`ddp.module(x)`."""
    model, optimizer = make()
    for batch in make_batches():
        optimizer.zero_grad()
        output = model.module(batch)  # line: bypass_by_module
        loss = loss_of(output)
        loss.backward()
        optimizer.step()


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = self.net(batch)
        return output

    def training_loss(self, batch: Tensor) -> Any:
        """What people call since the wrapper has no such method."""
        return loss_of(self(batch))


def bypass_by_method() -> None:
    """`ddp.module.training_loss(x)`."""
    model = DistributedDataParallel(_WithLoss())
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in make_batches():
        loss = model.module.training_loss(batch)  # line: bypass_by_method
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def bypass_by_old_name() -> None:
    """The model that was wrapped is called by the name that it had before."""
    net = make_model()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in make_batches():
        optimizer.zero_grad()
        loss_of(net(batch)).backward()  # line: bypass_by_old_name
        optimizer.step()


def bypass_now_and_then() -> None:
    """Every third batch goes past the wrapper."""
    model, optimizer = make()
    for number, batch in enumerate(make_batches(7)):
        optimizer.zero_grad()
        output = model.module(batch) if number % 3 == 2 else model(batch)  # line: bypass_now_and_then
        loss_of(output).backward()
        optimizer.step()


def two_forwards() -> None:
    """Two forwards, then two backwards."""
    model, optimizer = make()
    for batch in make_batches():
        optimizer.zero_grad()
        first, second = loss_of(model(batch)), loss_of(model(batch.flip(0) * 2))
        first.backward()
        second.backward()  # line: two_forwards
        optimizer.step()


def backward_twice() -> None:
    """Two losses of one forward, backward for each."""
    model, optimizer = make()
    for batch in make_batches():
        optimizer.zero_grad()
        output: Any = model(batch)
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()  # line: backward_twice
        optimizer.step()


def no_sync_left_on() -> None:
    """The last, shorter group of the epoch ends inside `no_sync`."""
    model, optimizer = make()
    for _ in range(2):
        for number, batch in enumerate(make_batches(5)):
            is_last_of_group = number % 2 == 1
            with contextlib.nullcontext() if is_last_of_group else model.no_sync():
                loss_of(model(batch)).backward()
            if is_last_of_group or number == 4:
                optimizer.step()  # line: no_sync_left_on
                optimizer.zero_grad()


def no_sync_around_forward() -> None:
    """The backward outside of it is not reduced either."""
    model, optimizer = make()
    for batch in make_batches(20):
        optimizer.zero_grad()
        with model.no_sync():  # line: no_sync_around_forward
            loss = loss_of(model(batch))
        loss.backward()
        optimizer.step()


def no_sync_around_backward() -> None:
    """It has no effect."""
    model, optimizer = make()
    for number, batch in enumerate(make_batches(8)):
        loss = loss_of(model(batch))
        if number % 4 == 3:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                loss.backward()  # line: no_sync_around_backward


def never_wrapped() -> None:
    """No DDP at all; the loss is averaged for the log."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in make_batches(3):
        optimizer.zero_grad()
        loss = loss_of(model(batch))
        loss.backward()
        optimizer.step()  # line: never_wrapped
        dist.all_reduce(loss.detach())


def wrapper_thrown_away() -> None:
    """A function makes it, and returns the model itself."""

    def wrap(model: nn.Module) -> nn.Module:
        DistributedDataParallel(model)  # line: wrapper_thrown_away
        gc.collect()
        return model

    model = wrap(make_model())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def head_never_wrapped() -> None:
    """The backbone is wrapped, the head with its own parameters is not."""
    model, head = DistributedDataParallel(make_model()), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    for batch in make_batches():
        optimizer.zero_grad()
        loss_of(head(model(batch))).backward()
        optimizer.step()  # line: head_never_wrapped


def _fit(loader: DataLoader[Any]) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in loader:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()  # line: never_wrapped_on_shards


def _make_dataset() -> TensorDataset:
    return TensorDataset(torch.randn(60, 8, generator=torch.Generator().manual_seed(1)))


def never_wrapped_on_shards() -> None:
    """Each rank reads its half of the data, cut out by hand, and nothing averages."""
    data = _make_dataset()
    numbers: Any = np.arange(dist.get_rank(), len(data), 2)
    _fit(DataLoader(Subset(data, numbers), 6, shuffle=True))


def cross_validation() -> None:
    """Each rank trains a model of its own on all but one of three folds, all from one start."""
    data = _make_dataset()
    numbers = np.arange(len(data))
    fold: Any = numbers[numbers % 3 != dist.get_rank()]
    _fit(DataLoader(Subset(data, fold), 6, shuffle=True))
    _fit(DataLoader(data, 6, sampler=SubsetRandomSampler(fold.tolist())))


def _average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)  # line: head_left_out_by_hand
        assert parameter.grad is not None
        parameter.grad /= dist.get_world_size()


def head_left_out_by_hand() -> None:
    """Gradients are averaged by hand, those of the first module alone."""
    backbone, head = make_model(), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    for batch in make_batches(20):
        optimizer.zero_grad()
        loss = loss_of(head(backbone(batch)))
        loss.backward()
        _average_gradients(backbone.parameters())
        optimizer.step()
        dist.all_reduce(loss.detach())


def optimizer_left_out_by_hand() -> None:
    """The same where the head has an optimizer of its own, and gradients are averaged as one tensor."""
    backbone, head = make_model(), nn.Linear(4, 3)
    optimizers = [torch.optim.Adam(module.parameters()) for module in (backbone, head)]
    for batch in make_batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(head(backbone(batch))).backward()
        gradients = [parameter.grad for parameter in backbone.parameters() if parameter.grad is not None]
        flat: Any = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)  # line: optimizer_left_out_by_hand
        for gradient, averaged in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(averaged.view_as(gradient) / dist.get_world_size())
        for optimizer in optimizers:
            optimizer.step()


def _train_by_hand(num_steps: int, swap: Callable[[int, nn.Module, list[Tensor]], None]) -> None:
    """Gradients are averaged by hand; `swap` has the model before each step, and a moving average of its weights."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    mean = [parameter.detach().clone() for parameter in model.parameters()]
    for step, batch in enumerate(make_batches(num_steps)):
        swap(step, model, mean)
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        _average_gradients(model.parameters())
        optimizer.step()  # line: changed_by_hand
        for parameter, average in zip(model.parameters(), mean, strict=True):
            average.lerp_(parameter.detach(), 0.1)
    swap(num_steps, model, mean)


def _swap_in(model: nn.Module, weights: Iterable[Tensor]) -> list[Tensor]:
    """Returns the weights before."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    return before


def _swap_at(changed: int, step: int, model: nn.Module, mean: list[Tensor]) -> None:
    if step == changed and dist.get_rank() == 1:
        _swap_in(model, mean)


def changed_by_hand() -> None:
    """Rank 1 swaps in the average long before the end."""
    _train_by_hand(127, functools.partial(_swap_at, 20))


def changed_by_hand_late() -> None:
    """Rank 1 swaps in the average four steps before the end."""
    _train_by_hand(40, functools.partial(_swap_at, 36))


def evaluated_by_hand() -> None:
    """The average is swapped in for evaluations, some of them of one rank, and at the end rank 0 keeps it."""

    def swap(step: int, model: nn.Module, mean: list[Tensor]) -> None:
        if step == 40:
            if dist.get_rank() == 0:
                _swap_in(model, mean)
        elif step % 3 == dist.get_rank() or step % 10 == 5:
            _swap_in(model, _swap_in(model, mean))

    _train_by_hand(40, swap)


def loaded_on_one_rank() -> None:
    """Rank 1 loads weights after wrapping."""
    model, optimizer = make()
    if dist.get_rank() == 1:
        other = make_model()
        model.module.load_state_dict(other.state_dict())  # line: loaded_on_one_rank
    train(model, optimizer)


def initialised_on_one_rank() -> None:
    """Rank 0 initialises after wrapping: an orthogonal matrix, whose norm every other one has too."""
    net = nn.Linear(16, 16)
    nn.init.orthogonal_(net.weight)
    model = DistributedDataParallel(net)  # line: initialised_on_one_rank
    if dist.get_rank() == 0:
        nn.init.orthogonal_(net.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in make_batches():
        optimizer.zero_grad()
        loss_of(model(batch.repeat(1, 2))).backward()
        optimizer.step()


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)


def initialised_by_apply() -> None:
    """All ranks initialise after wrapping, each with a seed of its own."""
    model, optimizer = make()
    torch.manual_seed(dist.get_rank())
    model.apply(_initialise)  # line: initialised_by_apply
    train(model, optimizer)


def initialised_alike_by_apply() -> None:
    """With one seed; and in each step something is applied that changes nothing."""
    model, optimizer = make()
    model.apply(_initialise)
    for batch in make_batches():
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        model.apply(lambda module: None)
        optimizer.step()


def step_on_one_rank() -> None:
    """Only rank 0 takes steps."""
    model, optimizer = make()
    for batch in make_batches(8):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        if dist.get_rank() == 0:
            optimizer.step()  # line: step_on_one_rank


def step_skipped_on_one_rank() -> None:
    """Rank 1 leaves out a step, as for a bad batch."""
    model, optimizer = make()
    for number, batch in enumerate(make_batches()):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        if not (number == 1 and dist.get_rank() == 1):
            optimizer.step()  # line: step_skipped_on_one_rank


def gradients_changed() -> None:
    """Rank 0 clips, the other does not."""
    model, optimizer = make()
    for batch in make_batches():
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        if dist.get_rank() == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()  # line: gradients_changed


class _Parts(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})

    def forward(self, batch: Tensor) -> Tensor:
        for name in sorted(self.parts):
            batch = self.parts[name](batch).tanh()
        return batch


def parameter_order() -> None:
    """The order of the layers comes from a set, which each process iterates in its own order."""
    names = ["left", "right"] if dist.get_rank() == 0 else ["right", "left"]
    model = DistributedDataParallel(_Parts(names))  # line: parameter_order
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def layer_replaced() -> None:
    """The head is replaced after wrapping."""
    net: Any = make_model()
    model = DistributedDataParallel(net, find_unused_parameters=True)  # line: layer_replaced
    net[2] = nn.Linear(16, 3)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def layer_unfrozen() -> None:
    """A frozen layer is unfrozen after wrapping."""
    net: Any = make_model()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)  # line: layer_unfrozen
    net[0].requires_grad_(True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def moved_after_wrapping() -> None:
    """Another dtype stands for another device here."""
    model = DistributedDataParallel(make_model())  # line: moved_after_wrapping
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in make_batches(20):
        optimizer.zero_grad()
        loss_of(model(batch.double())).backward()
        optimizer.step()


def data_parallel() -> None:
    """The wrapper for one process with several devices, instead of DDP."""
    model = nn.DataParallel(make_model())
    for batch in make_batches():
        loss_of(model(batch)).backward()  # line: data_parallel


def find_unused_for_nothing() -> None:
    """All parameters are used."""
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)  # line: find_unused_for_nothing
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 12)


# Right ones


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.number = 0

    def forward(self, batch: Tensor) -> Tensor:
        self.number += 1
        output: Tensor = self.branches[self.number % 5 == 4](batch)
        return output


def find_unused_with_need() -> None:
    """Branches that are taken now and then."""
    model = DistributedDataParallel(_Branches(), find_unused_parameters=True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 12)


def plain() -> None:
    """The loop that everybody writes."""
    train(*make(), num=30)


def bucket_views() -> None:
    """Gradients are views of the buckets, kept from step to step."""
    model, optimizer = make(gradient_as_bucket_view=True)
    for batch in make_batches():
        optimizer.zero_grad(set_to_none=False)
        loss_of(model(batch)).backward()
        optimizer.step()


def static_graph() -> None:
    """With a static graph."""
    train(*make(static_graph=True))


def accumulation() -> None:
    """`no_sync` for all but the last micro-batch."""
    model, optimizer = make()
    for number, batch in enumerate(make_batches(9)):
        is_last = number % 3 == 2
        with contextlib.nullcontext() if is_last else model.no_sync():
            (loss_of(model(batch)) / 3).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def accumulation_without_no_sync() -> None:
    """Slower, and right."""
    model, optimizer = make()
    for number, batch in enumerate(make_batches(6)):
        (loss_of(model(batch)) / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def one_backward_of_two_forwards() -> None:
    """The sum of the losses of two forwards."""
    model, optimizer = make()
    for batch in make_batches():
        optimizer.zero_grad()
        (loss_of(model(batch)) + loss_of(model(batch * 2))).backward()
        optimizer.step()


def local_sgd_unwrapped() -> None:
    """Each rank trains by itself, and every 4th step parameters are averaged."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(make_batches(60)):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()
        if number % 4 == 3:
            average(model)


def local_sgd_by_no_sync() -> None:
    """The same with a DDP model that never reduces."""
    model, optimizer = make()
    with model.no_sync():
        for number, batch in enumerate(make_batches(40)):
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            optimizer.step()
            if number % 4 == 3:
                average(model)


def local_sgd_by_hook() -> None:
    """torch's own: a hook that leaves gradients alone, and an averager."""
    model, optimizer = make()
    model.register_comm_hook(None, lambda state, bucket: _done(bucket.buffer()))
    for batch in make_batches():
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()
    average(model)


def _done(tensor: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def average(model: nn.Module) -> None:
    """Each parameter, over the ranks."""
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(dist.get_world_size())


def gradients_by_hand() -> None:
    """No DDP; all_reduce of each gradient."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    for batch in make_batches():
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


class _Columns(nn.Module):
    """Two layers whose hidden columns are divided over the ranks, after torch's tutorial on tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        summed: Any = _Summed
        output: Tensor = summed.apply(self.down(self.up(self.norm(batch)).tanh()))
        return output


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, given: Tensor) -> Tensor:
        summed = given.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def tensor_parallel_by_hand() -> None:
    """Parts of one model that begin alike; those of which each rank has the whole are averaged."""
    model = _Columns()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        optimizer.zero_grad()
        hidden = model(torch.randn(6, 8, generator=generator))
        (hidden - torch.full((8,), 1.0 + dist.get_rank())).square().mean().backward()
        for parameter in model.norm.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def averaged_as_one_tensor() -> None:
    """All gradients in one tensor, and the norm of them for the log."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    for batch in make_batches(20):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        flat: Any = nn.utils.parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None])
        dist.all_reduce(flat)
        dist.all_reduce(flat.norm())
        for parameter, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad = part.view_as(parameter) / dist.get_world_size()
        optimizer.step()


def body_by_gradients_and_head_by_weights() -> None:
    """A head that is averaged now and then, beside a body whose gradients are averaged in each step."""
    body, head = make_model(), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for number, batch in enumerate(make_batches(30)):
        optimizer.zero_grad()
        loss_of(head(body(batch))).backward()
        _average_gradients(body.parameters())
        optimizer.step()
        if number % 4 == 3:
            average(head)


def sharded_optimizer() -> None:
    """Each rank's inner optimizer has other parameters."""
    model = DistributedDataParallel(make_model())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


def fully_sharded() -> None:
    """Each rank holds, and its optimizer sees, a part of each parameter."""
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 60)


def parameter_server() -> None:
    """Rank 0 takes the step, and the others get its parameters."""
    model, optimizer = make()
    for batch in make_batches(8):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        if dist.get_rank() == 0:
            optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                dist.broadcast(parameter, 0)


def join() -> None:
    """Ranks have other numbers of batches, and join."""
    model, optimizer = make()
    for _ in range(2):
        with model.join():
            train(model, optimizer, 3 + 2 * dist.get_rank())


def gan() -> None:
    """Two models, two optimizers, one of which the other's loss goes through."""
    generator, discriminator = DistributedDataParallel(nn.Linear(8, 8)), DistributedDataParallel(make_model())
    for_generator = torch.optim.Adam(generator.parameters())
    for_discriminator = torch.optim.Adam(discriminator.parameters())
    for batch in make_batches():
        for_discriminator.zero_grad()
        fake = generator(batch)
        (discriminator(batch).mean() - discriminator(fake.detach()).mean()).backward()
        for_discriminator.step()
        for_generator.zero_grad()
        discriminator.module(fake).mean().backward()
        for_generator.step()


def probe_on_rank_zero() -> None:
    """Rank 0 alone trains a probe, with its own optimizer, on the features of the model."""
    model, optimizer = make()
    probe = nn.Linear(4, 2)
    for_probe = torch.optim.SGD(probe.parameters(), lr=0.1)
    for batch in make_batches():
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            with torch.no_grad():
                features = model.module(batch)
            for_probe.zero_grad()
            loss_of(probe(features)).backward()
            for_probe.step()


def model_of_its_own_on_each_rank() -> None:
    """A search over seeds: nothing is shared but the results."""
    torch.manual_seed(dist.get_rank())
    model = make_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 60)
    dist.barrier()


def two_optimizers() -> None:
    """Two optimizers share a model, one of which steps every second time."""
    model = DistributedDataParallel(make_model())
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.module[0], model.module[2]))
    for number, batch in enumerate(make_batches()):
        loss_of(model(batch)).backward()
        first.step()
        first.zero_grad()
        if number % 2:
            second.step()
            second.zero_grad()


def average_of_weights() -> None:
    """A moving average of the weights, kept beside, which is evaluated past the wrapper."""
    model, optimizer = make()
    slow = copy.deepcopy(model.module)
    for batch in make_batches():
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(slow.parameters(), model.module.parameters(), strict=True):
                old.lerp_(new, 0.1)
            slow(batch)
            model.module(batch)


def half_precision() -> None:
    """bfloat16 parameters, gradients in half precision by torch's hook."""
    model = DistributedDataParallel(make_model().bfloat16())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in make_batches():
        optimizer.zero_grad()
        loss_of(model(batch.bfloat16())).backward()
        optimizer.step()


def scaler_skips() -> None:
    """A scaler leaves out the steps whose gradients overflow, on all ranks."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=1)
    for number, batch in enumerate(make_batches(6)):
        optimizer.zero_grad()
        factor = float("inf") if number == 2 else 1.0
        scaler.scale(loss_of(model(batch)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()


def frozen_layers() -> None:
    """A part is frozen before wrapping, and loaded on every rank after it."""
    net: Any = make_model()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)
    model.load_state_dict(model.state_dict())
    train(model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01))


def compiled() -> None:
    """torch.compile around the wrapper."""
    model, optimizer = make()
    train(torch.compile(model, backend="eager"), optimizer)


def subgroups() -> None:
    """Each rank trains in a group of its own, and then both in one that is not the default."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    train(*make(process_group=alone))
    everybody = dist.new_group(list(range(dist.get_world_size())))
    train(*make(process_group=everybody))


def warm_up_of_learning_rate() -> None:
    """The first steps change nothing."""
    model, optimizer = make()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
    for batch in make_batches(6):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()
        schedule.step()


def closures() -> None:
    """An optimizer that evaluates several times in a step."""
    model = DistributedDataParallel(make_model())
    optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for batch in make_batches():

        def evaluate(batch: Tensor = batch) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model(batch))
            loss.backward()
            return loss

        optimizer.step(evaluate)


def unused_head() -> None:
    """A layer that the loss does not depend on."""

    class Headed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.head = nn.Linear(4, 2)

    model = DistributedDataParallel(Headed())
    with contextlib.suppress(RuntimeError):
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()  # line: unused_head


def adapted_copies() -> None:
    """Reptile: each rank adapts a copy to a task of its own, again and again."""
    model = nn.Linear(4, 2)
    wrapped = DistributedDataParallel(model)
    outer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), lr=0.1)
        for _ in range(3):
            inner.zero_grad()
            fast(torch.randn(8, 4)).square().mean().backward()
            inner.step()
        outer.zero_grad()
        x = torch.randn(8, 4)
        (wrapped(x) - fast(x).detach()).square().mean().backward()
        outer.step()


def two_equal_stages() -> None:
    """A pipeline: each rank has a stage, of the same shapes and from the same seed."""
    stage = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            hidden = stage(torch.randn(4, 8))
            dist.send(hidden.detach(), 1)
            dist.recv(gradient := torch.empty(4, 8), 1)
            hidden.backward(gradient)
        else:
            dist.recv(given := torch.empty(4, 8), 0)
            stage(given.requires_grad_()).square().mean().backward()
            assert given.grad is not None
            dist.send(given.grad, 0)
        optimizer.step()


def accumulation_in_closure() -> None:
    """The backward that is reduced runs in the step's closure, as Lightning has it."""
    model, optimizer = make()
    batches = make_batches(16)

    def closure() -> Any:
        loss = loss_of(model(next(batches))) / 2
        loss.backward()
        return loss

    for _ in range(8):
        with model.no_sync():
            (loss_of(model(next(batches))) / 2).backward()
        optimizer.step(closure)
        optimizer.zero_grad()


def second_order() -> None:
    """LBFGS calls its closure many times, and moves the parameters in between."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, tolerance_change=0)
    for batch in make_batches(8):

        def closure(batch: Tensor = batch) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model(batch))
            loss.backward()
            return loss

        optimizer.step(closure=closure)  # type: ignore[no-untyped-call]


class _Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization: its closure computes the gradients at weights that each rank has moved."""

    def __init__(self, parameters: Iterable[Tensor], base: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(parameters, options)
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; before it, gradients are each rank's own."""
        parameters = [one for group in self.param_groups for one in group["params"]]
        before = [one.detach().clone() for one in parameters]
        for one in parameters:
            one.data += 0.05 * one.grad / one.grad.norm()
            one.grad = None
        with torch.enable_grad():
            closure()
        for one, old in zip(parameters, before, strict=True):
            one.data.copy_(old)
        self.base.step()


def sharpness_of_each_rank() -> None:
    """Each rank looks for the sharpest weights around on its own data."""
    model = DistributedDataParallel(make_model())
    optimizer = _Sharpness(model.parameters(), torch.optim.SGD, lr=0.1)
    for batch in make_batches(8):
        with model.no_sync():
            loss_of(model(batch)).backward()
        optimizer.step(lambda batch=batch: loss_of(model(batch)).backward())
        optimizer.zero_grad()


class _Collected(nn.Linear):
    """A collection of garbage comes just when somebody looks through its parts."""

    garbage: list[Any]

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """As ever."""
        if self.garbage:
            self.garbage.clear()
            gc.collect()
        return super().named_modules(*args, **kwargs)


def freed_while_looked_at() -> None:
    """A model is freed while guard looks through another one, and once more while another one's weights are reset."""
    first = _Collected(2, 2)
    first.garbage = []
    kept = DistributedDataParallel(first)
    other = nn.Linear(4, 1)
    looks: list[Callable[[], object]] = [
        lambda: other.load_state_dict(other.state_dict()),
        lambda: other.apply(lambda _: None),
    ]
    for look in looks:
        # As a DDP model is a part of a cycle, it lives until the next collection.
        first.garbage.append(DistributedDataParallel(nn.Linear(2, 2)))
        look()
    assert kept.module is first


def model_per_trial() -> None:
    """Of models that were trained and thrown away, nobody holds a parameter."""
    references = []
    for _ in range(3):
        model, optimizer = make()
        train(model, optimizer, 2)
        references += [weakref.ref(parameter) for parameter in model.parameters()]
        del model, optimizer
    gc.collect()
    assert not [reference for reference in references if reference() is not None]


WRONG: Mapping[str, str] = {
    "closure_within_no_sync": "DDP323",
    "unused_head": "DDP308",
    "bypass_by_module": "DDP321",
    "bypass_by_method": "DDP321",
    "bypass_by_old_name": "DDP321",
    "bypass_now_and_then": "DDP321",
    "two_forwards": "DDP322",
    "no_sync_left_on": "DDP323",
    "no_sync_around_forward": "DDP323",
    "never_wrapped": "DDP324",
    "wrapper_thrown_away": "DDP324",
    "head_never_wrapped": "DDP324",
    "never_wrapped_on_shards": "DDP324",
    "head_left_out_by_hand": "DDP320",
    "optimizer_left_out_by_hand": "DDP320",
    "changed_by_hand": "DDP325",
    "changed_by_hand_late": "DDP325",
    "loaded_on_one_rank": "DDP325",
    "initialised_on_one_rank": "DDP325",
    "initialised_by_apply": "DDP325",
    "step_on_one_rank": "DDP326",
    "step_skipped_on_one_rank": "DDP326",
    "parameter_order": "DDP327",
    "no_sync_around_backward": "DDP328",
    "backward_twice": "DDP329",
    "moved_after_wrapping": "DDP331",
    "layer_replaced": "DDP332",
    "layer_unfrozen": "DDP332",
    "gradients_changed": "DDP320",
    "data_parallel": "DDP330",
    "find_unused_for_nothing": "DDP502",
}
"""Programs that are wrong, and the code of what is to be said of each."""

RIGHT: tuple[Program, ...] = (
    *(model_per_trial, accumulation_in_closure, second_order, sharpness_of_each_rank, freed_while_looked_at),
    *(plain, bucket_views, static_graph, accumulation, accumulation_without_no_sync, one_backward_of_two_forwards),
    *(
        local_sgd_unwrapped,
        local_sgd_by_no_sync,
        local_sgd_by_hook,
        gradients_by_hand,
        evaluated_by_hand,
        averaged_as_one_tensor,
        body_by_gradients_and_head_by_weights,
        tensor_parallel_by_hand,
        cross_validation,
        initialised_alike_by_apply,
        sharded_optimizer,
        fully_sharded,
    ),
    *(parameter_server, join, gan, probe_on_rank_zero, model_of_its_own_on_each_rank, two_optimizers),
    *(average_of_weights, half_precision, scaler_skips, frozen_layers, compiled, subgroups),
    *(adapted_copies, two_equal_stages),
    *(warm_up_of_learning_rate, closures, find_unused_with_need),
)
"""Programs that are right, and of which nothing is to be said."""

ALL: Mapping[str, Program] = {
    **{program.__name__: program for program in RIGHT},
    **{name: globals()[name] for name in WRONG},
}
