# SPDX-License-Identifier: Apache-2.0
"""`shard="optimizer"`: the same numbers with less memory on each rank, and checkpoints that load back into either."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

from benchmarks.small_models import loss_fn, make_data, make_model
from ddpilot.errors import LoopError, MismatchedCheckpointError
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.optimizers import full_state, load_full_state
from tests.dist.training.bodies import assert_same, launch

NUM_EPOCHS = 2


def make_optimizer(model: nn.Module) -> AdamW:
    """Two groups, as people make them to leave vectors out of weight decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}]
    return AdamW(groups, lr=1e-2, weight_decay=0.0)


def bytes_of(states: Iterable[Any]) -> int:
    """Bytes of the tensors in the states of parameters."""
    return sum(value.nbytes for state in states for value in state.values() if torch.is_tensor(value) and value.ndim)


def held(optimizer: Optimizer) -> int:
    """Bytes of state that this rank has."""
    return bytes_of(getattr(optimizer, "optim", optimizer).state.values())


def run(shard: Any, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train from the beginning or go on from `given`; weights, optimizer and schedule at the end, and memory."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=5, accumulate=3)
    model = make_model("gpt")
    optimizer: Any = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 3e-3], total_steps=20)
    model, optimizer = loop.prepare(model, optimizer, shard=shard)
    if given is not None:
        unwrap(model).load_state_dict(given["weights"])
        load_full_state(optimizer, given["optimizer"])
        scheduler.load_state_dict(given["scheduler"])
        loop.epoch = 1
    loader = loop.loader(make_data("gpt", 61), global_batch_size=12, shuffle=True)
    for _ in loop.epochs(1 if given is None else NUM_EPOCHS):
        for x, y in loop.batches(loader):
            with loop.accumulate(model):
                loop.backward(loss_fn(model(x), y), count=int((y != -100).sum()))
            loop.clip_grad_norm_(model.parameters(), 0.5)
            loop.step(optimizer, scheduler)
    return {
        "weights": copy.deepcopy(unwrap(model).state_dict()),
        "optimizer": copy.deepcopy(full_state(optimizer)),
        "scheduler": scheduler.state_dict(),
        "held": held(optimizer),
    }


def run_all(starts: list[tuple[Any, dict[str, Any] | None]]) -> list[dict[str, Any]]:
    """One training for each kind of optimizer, from the state beside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [run(shard, copy.deepcopy(start)) for shard, start in starts]


def test_sharded_optimizer_trains_the_same_and_its_state_loads_into_either() -> None:
    """At 2 ranks, then on at 1 and at 3, from the state of either kind into either kind."""
    ranks = launch(2, run_all, [(None, None), ("optimizer", None)])
    plain, sharded = ranks[0]
    for name in ("weights", "optimizer", "scheduler"):
        assert_same(sharded[name], plain[name])
    assert_same(ranks[1][1]["weights"], plain["weights"])
    assert ranks[1][1]["optimizer"]["state"] == {}
    whole = bytes_of(plain["optimizer"]["state"].values())
    shares = [rank[1]["held"] for rank in ranks]
    assert sum(shares) == whole == plain["held"]
    assert max(shares) < 0.6 * whole
    (expected,) = launch(1, run_all, [(None, sharded)])[0]
    on_three = launch(3, run_all, [("optimizer", plain), ("optimizer", sharded), (None, sharded)])[0]
    assert not torch.equal(expected["weights"]["head.weight"], plain["weights"]["head.weight"])
    for continued in on_three:
        for name in ("weights", "optimizer", "scheduler"):
            assert_same(continued[name], expected[name])


def overflow_once(shard: Any) -> tuple[list[bool], list[float]]:
    """Three fp16 updates, of which the second one overflows on rank 1; which were made, and the weights."""
    loop = Loop(seed=1, precision="fp16")
    model = nn.Linear(2, 2)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), shard=shard)
    done = []
    for number, (x,) in enumerate(loop.batches(loop.loader(TensorDataset(torch.ones(6, 2)), global_batch_size=2))):
        with loop.accumulate(model):
            loss = model(x).float().pow(2).mean() / 1000
            loop.backward(loss * (3e38 if number == 1 and loop.rank == 1 else 1.0))
        done.append(loop.step(optimizer))
    return done, torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def use_wrongly() -> list[str]:
    """What each wrong use is told; what a closure returned, on ranks of which one has no parameter; fp16 as without."""
    loop = Loop()
    model = nn.Linear(2, 1, bias=False)
    original = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.ones(1, 2)
    original.step()
    model, optimizer = loop.prepare(model, original, shard="optimizer")
    numbers = [held(optimizer), len(full_state(optimizer)["state"])]
    said = [f"{numbers} {optimizer.step(lambda: 0.5)} {overflow_once('optimizer') == overflow_once(None)}"]
    other = torch.optim.SGD([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))], lr=0.1)
    for use in (
        original.step,
        optimizer.state_dict,
        lambda: loop.prepare(optimizer, shard="optimizer"),
        lambda: load_full_state(optimizer, other.state_dict()),
    ):
        try:
            use()
        except (LoopError, MismatchedCheckpointError) as error:
            said.append(str(error))
    return said


def test_sharded_optimizer_keeps_earlier_state_and_refuses_what_would_go_wrong_silently() -> None:
    """Momentum from before goes to the rank that has the parameter; fp16 skips on all ranks; misuse is an error."""
    zero, one = launch(2, use_wrongly)
    assert (zero[0], one[0]) == ("[8, 1] 0.5 True", "[0, 0] 0.5 True")
    for said, text in zip(one[1:], REFUSALS, strict=True):
        assert text in said


REFUSALS = (
    "its state is in the returned optimizer. Write model, optimizer = loop.prepare(model, optimizer, ...)",
    "rank 1 has the state of its own parameters only. Call ddpilot.full_state(optimizer)",
    "it is sharded already",
    "its groups have 2 parameters, the groups of this ZeroOptimizer have 1",
)
