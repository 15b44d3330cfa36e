# SPDX-License-Identifier: Apache-2.0
"""`shard="parameters"` (FSDP2): the numbers of a single process, and checkpoints that load into DDP and back."""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from benchmarks.small_models import loss_fn, make_data, make_model
from ddpilot.errors import LoopError, NonFiniteError
from ddpilot.training.loop import Loop
from ddpilot.training.models.optimizers import full_state, load_full_state
from ddpilot.training.models.sharding import ParameterSharding
from tests.dist.training.bodies import assert_same, launch

SMALL = ParameterSharding(min_parameters=64)


def train(shard: Any, num_epochs: int = 2, **options: Any) -> dict[str, Any]:
    """Train on batches of which the last leaves a rank of three empty; everything that a user reads, on rank 0."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=5, accumulate=3, progress=False, **options)
    model = make_model("gpt")
    optimizer: Any = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer = loop.prepare(model, optimizer, shard=shard)
    held = sum(one.nbytes for one in map(local, model.parameters()))
    loader = loop.loader(make_data("gpt", 37), global_batch_size=12, shuffle=True)
    losses, norms = [], []
    for _ in loop.epochs(num_epochs):
        for x, y in loop.batches(loader):
            with loop.accumulate(model):
                loss = loss_fn(model(x), y)
                count = int((y != -100).sum())
                loop.backward(loss, count=count)
            norm = loop.clip_grad_norm_(model.parameters(), 0.5)
            losses.append(loop.reduce(loss.detach() if count else 0.0, count=count).item())
            norms += [] if norm is None else [norm.item()]
            loop.step(optimizer)
    few = make_data("gpt", 13)
    rows = loop.loader(few, global_batch_size=4)
    return {
        "losses": losses,
        "norms": norms,
        "metrics": loop.evaluate(model, rows, {"loss": per_batch}),
        "outputs": loop.predict(model, rows),
        "weights": copy.deepcopy(full_state(model)),
        "optimizer": copy.deepcopy(full_state(optimizer)),
        "held": held,
        "findings": [str(one) for one in loop.findings],
    }


def train_on_two(shard: Any) -> dict[str, Any]:
    """Two loaders in step: of three ranks, one has no samples of one of them; a step of the user's own evaluates."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=5, progress=False)
    model = make_model("mlp")
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    model, optimizer = loop.prepare(model, optimizer, shard=shard)
    first = loop.loader(make_data("mlp", 10), global_batch_size=4, shuffle=True)
    second = loop.loader(make_data("mlp", 27), global_batch_size=5, shuffle=True)
    for (x, y), (more, _) in loop.batches(first, second, ends="longest"):
        loop.backward((loss_fn(model(x), y), 0.3 * model(more).square().mean()))
        loop.step(optimizer)

    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        output = model(batch[0])
        return {"loss": loss_fn(output, batch[1]), "size": output.square().mean(1)}

    values = loop.evaluate(model, loop.loader(make_data("mlp", 13), global_batch_size=3), step=step)
    return {"values": values, "weights": copy.deepcopy(full_state(model))}


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation that calls its closure for both gradients itself, of whole or sharded parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; returns the loss."""
        loss = torch.enable_grad()(closure)()
        held = [one for one in self.param_groups[0]["params"] if one.grad is not None]
        norm = nn.utils.get_total_norm([one.grad for one in held])
        moves = [0.05 * one.grad / norm for one in held]
        for one, move in zip(held, moves, strict=True):
            one.add_(move)
        torch.enable_grad()(closure)()
        for one, move in zip(held, moves, strict=True):
            one.sub_(move).sub_(one.grad, alpha=0.1)
        return loss


def train_with_sam(shard: Any) -> dict[str, Any]:
    """Two passes over batches of which the last leaves a rank of three empty."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=5, progress=False)
    model = make_model("mlp")
    optimizer: Any = Sam(model.parameters())
    model, optimizer = loop.prepare(model, optimizer, shard=shard)
    loader = loop.loader(make_data("mlp", 14), global_batch_size=6, shuffle=True)
    for _ in range(2):
        for x, y in loop.batches(loader):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                loop.backward(loss_fn(model(x), y))

            loop.step(optimizer, closure=closure)
    return {"weights": copy.deepcopy(full_state(model))}


def per_batch(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The mean loss of a batch and its count."""
    return loss_fn(output, target), int((target != -100).sum())


def local(parameter: Any) -> torch.Tensor:
    """The part of a parameter that this rank has."""
    part: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def train_both(folder: str, steps: list[tuple[str, Any, int]]) -> list[dict[str, Any]]:
    """A training for each of `steps`: checkpoint directory ("" for none; "two loaders"; "sam"), `shard`, and epochs."""
    other = {"two loaders": train_on_two, "sam": train_with_sam}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [
            other[name](shard)
            if name in other
            else train(shard, num, checkpoint_dir=f"{folder}/{name}")
            if name
            else train(shard, num)
            for name, shard, num in steps
        ]


READ = ("losses", "norms", "metrics", "outputs", "weights", "optimizer", "findings")


@pytest.mark.soak
def test_sharded_parameters_train_the_same_at_any_number_of_ranks_and_resume_from_each_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Everything at 1 and 2 ranks; and one epoch at 2 ranks goes on at 3, in DDP, and alone; and from DDP."""
    others = (("sam", SMALL, 0), ("two loaders", SMALL, 0))
    ((alone, _, *of_others),) = launch(1, train_both, str(tmp_path), [("", None, 2), ("plain", None, 1), *others])
    is_soak = bool(os.environ.get("DDPILOT_SOAK"))
    two = launch(2, train_both, str(tmp_path), [("", SMALL, 2), ("two", SMALL, 1), *(others if is_soak else ())])
    for name in ("in3", "in_ddp", "in1"):
        shutil.copytree(tmp_path / "two", tmp_path / name)
    three = launch(3, train_both, str(tmp_path), [("in3", SMALL, 2), ("plain", SMALL, 2), *others])
    ((ddp,), _) = launch(2, train_both, str(tmp_path), [("in_ddp", None, 2)])
    ((single,),) = launch(1, train_both, str(tmp_path), [("in1", SMALL, 2)])
    same = [two[0][0]]
    if is_soak:
        same += [launch(num, train_both, str(tmp_path), [("", SMALL, 2)])[0][0] for num in (3, 4)]
        assert_same(two[0][-2:], of_others)
    for name in READ:
        for found in same:
            assert_same(found[name], alone[name])
    assert_same(three[0][-2:], of_others)
    for resumed in (three[0][0], three[0][1], ddp, single):
        for name in ("metrics", "outputs", "weights", "optimizer"):
            assert_same(resumed[name], alone[name])
    assert sum(rank[0]["held"] for rank in three) == alone["held"]
    assert max(rank[0]["held"] for rank in three) < 0.5 * alone["held"]
    said = [line for line in capfd.readouterr().err.splitlines() if "resuming from" not in line]
    assert not said, "guard and watch report nothing"


class Uncopied(nn.Linear):
    """A layer that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("one of a kind")


def use_wrongly(folder: Path) -> list[str]:
    """What is found in values that are not finite, and what each wrong use is told."""
    loop = Loop(progress=False)
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = loop.prepare(model, optimizer, shard="parameters")
    said = []
    loader = loop.loader(TensorDataset(torch.ones(6, 2)), global_batch_size=3)
    try:
        for (x,) in loop.batches(loader):
            with loop.accumulate(model):
                loop.backward(model(x).mean() * (float("nan") if loop.rank == 1 else 1.0))
            loop.step(optimizer)
    except NonFiniteError as error:
        said.append(str(error))
    weights = full_state(model)
    if loop.rank == 0:
        assert all(bool(torch.isfinite(one).all()) for one in weights.values())
        torch.save({name: one + 1 for name, one in weights.items()}, folder / "more.pt")
    loop.group.all_gather_object(None)
    loop.load(model, folder / "more.pt")
    more = full_state(model)
    assert all(torch.equal(more[name], one + 1) for name, one in weights.items())
    load_full_state(model, loop.group.broadcast_object(weights))
    again = full_state(model)
    assert all(torch.equal(again[name], one) for name, one in weights.items())
    wrong = nn.Linear(2, 2)
    unknown: Any = "weights"
    for use in (
        lambda: loop.prepare(wrong, shard="parameters", comm="bf16"),
        lambda: loop.prepare(model, shard="parameters"),
        lambda: loop.prepare(AveragedModel(wrong)),
        lambda: Loop(precision="fp16").prepare(wrong, shard="parameters"),
        lambda: loop.prepare(wrong, shard=ParameterSharding(layers=nn.Conv2d)),
        lambda: loop.prepare(wrong, shard=ParameterSharding(methods=("encode",))),
        lambda: ParameterSharding(min_parameters=0),
        lambda: ParameterSharding(param_dtype=torch.int8),
        lambda: loop.prepare(nn.Linear(2, 2), torch.optim.LBFGS(model.parameters()), shard=unknown),
        lambda: loop.average(loop.prepare(Uncopied(2, 2), shard="parameters"), 0.9),
    ):
        try:
            use()
        except LoopError as error:
            said.append(f"{error} {error.__cause__!r}")
    return [*said, str(loop.explain())]


def test_a_nan_reaches_all_ranks_before_the_weights_and_misuse_is_refused(tmp_path: Path) -> None:
    """One rank's loss is NaN; all raise. Options that do not go together are named."""
    for said in launch(2, use_wrongly, tmp_path):
        for text, expected in zip(said, REFUSALS, strict=True):
            assert expected in text


REFUSALS = (
    "the loss is nan",
    "`comm`, an option of DDP",
    "it is sharded already",
    "an AveragedModel without `shard`, and a model whose parameters are sharded",
    'precision="fp16"',
    "no layer is a",
    "`methods` names 'encode', which Linear lacks",
    "`min_parameters` is 0",
    "`param_dtype` is torch.int8",
    "`shard` is 'weights'",
    "raised TypeError: one of a kind. Leave what cannot be copied out of the model",
    "parameters sharded over 2 ranks (FSDP2)",
)


class Coder(nn.Module):
    """A model with a method that runs it beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """What `forward` returns."""
        return torch.as_tensor(self.layers(x * self.scale)).clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return self.encode(x)


class Gathers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the all-gathers of tensors in its block."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += "allgather_base" in str(func)  # not of objects
        return func(*args, **(kwargs or {}))


def train_in_bf16(by_hand: bool, offloads: bool) -> tuple[list[torch.Tensor], int]:
    """Four updates through `encode`, of layers in bf16 with gradients in float32: the weights, and the all-gathers."""
    loop = Loop(seed=3, progress=False)
    model = Coder()
    if by_hand:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        offload = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (model.layers[0], model.layers[2], model):
            fully_shard(layer, mp_policy=policy, offload_policy=offload)
        register_fsdp_forward_method(model, "encode")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not by_hand:
        mixed: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "cpu_offload": offloads}
        sharding = ParameterSharding(layers=nn.Linear, methods=("encode",), **mixed)
        model, optimizer = loop.prepare(model, optimizer, shard=sharding)
    data = torch.randn(16, 6)
    with Gathers() as gathers:  # type: ignore[no-untyped-call]
        if by_hand:
            for number in range(4):
                loss = model.encode(data[4 * number + 2 * loop.rank :][:2]).float().pow(2).mean()
                torch.autograd.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        else:
            for (x,) in loop.batches(loop.loader(TensorDataset(data), global_batch_size=4)):
                loop.backward(model.encode(x).float().pow(2).mean())
                loop.clip_grad_norm_(model.parameters(), 1e9)
                loop.step(optimizer)
    return [one.full_tensor().detach() for one in model.parameters()], gathers.num  # type: ignore[attr-defined]


def train_in_bf16_both_ways() -> list[tuple[list[torch.Tensor], int]]:
    """With the loop, and by hand; then with shards in CPU memory."""
    return [train_in_bf16(by_hand, offloads) for offloads in (False, True) for by_hand in (False, True)]


def test_mixed_precision_and_methods_are_those_of_fully_shard_by_hand() -> None:
    """Bit for bit, and parameters are gathered just as often."""
    for (loop, num_gathers), *others in launch(2, train_in_bf16_both_ways):
        assert all(all(map(torch.equal, loop, other)) for other, _ in others)
        assert loop[0].dtype is torch.float32
        assert num_gathers > 0
        assert {num for _, num in others} == {num_gathers}
