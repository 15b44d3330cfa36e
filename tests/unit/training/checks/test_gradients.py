# SPDX-License-Identifier: Apache-2.0
"""Backward passes on one rank: several losses, several optimizers, cleared gradients, and what several ranks refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from ddpilot import FakeGroup
from ddpilot.errors import LoopError, NonFiniteError
from ddpilot.training.loop import Loop
from ddpilot.training.loss_weights import NUM_COUNTS, decode, encode, read_losses

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")


class Two(nn.Module):
    """Two weights, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: (samples, 1)."""
        return self.a(x), self.b(x)


def make(num_samples: int = 8, **options: Any) -> tuple[Loop, Two, list[torch.optim.SGD], Any]:
    """A loop alone, a model, an optimizer for each of its weights, and a loader of batches of four ones."""
    loop = Loop(group=FakeGroup(), progress=False, **options)
    model = Two()
    nn.init.ones_(model.a.weight)
    nn.init.ones_(model.b.weight)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.a, model.b)]
    loop.prepare(model, *optimizers)
    loader = loop.loader(TensorDataset(torch.ones(num_samples, 1)), global_batch_size=4)
    return loop, model, optimizers, loader


def gradients(model: Two) -> list[float]:
    """Of both weights."""
    return [math.nan if one.grad is None else one.grad.item() for one in model.parameters()]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_fp16_updates_two_optimizers_by_one_scale(clips: bool, num_steps: int) -> None:
    """Both weights move by 0.1 per step, though the first optimizer's step would make the scale grow."""
    loop, model, optimizers, loader = make(4, precision="fp16")
    assert loop._precision.scaler is not None
    loop._precision.scaler.set_growth_interval(1)
    loop._precision.scaler._init_scale = 1024.0
    scales = []
    for (x,) in loop.batches(loader):
        for _ in range(num_steps):
            with loop.accumulate(model):
                a, b = model(x)
                loop.backward((a + b).float().mean())
            if clips:
                assert loop.clip_grad_norm_(model.parameters(), 1e6) == pytest.approx(math.sqrt(2), rel=1e-3)
            assert [loop.step(optimizer) for optimizer in optimizers] == [True, True]
            scales.append(loop._precision.scaler.get_scale())
    assert [weight.item() for weight in model.parameters()] == pytest.approx([1 - 0.1 * num_steps] * 2, rel=1e-3)
    assert scales == [1024.0] * num_steps
    assert loop._precision.scaler.get_scale() == 2048.0


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what makes the host wait for a device: numbers that Python asks for."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`."""
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scale", [1024.0, 2.0**20])
def test_fp16_waits_once_for_each_update(scale: float) -> None:
    """Whether the gradients overflowed is read once, as torch's scaler does, whether the update is made or skipped."""
    loop, model, (optimizer, _), loader = make(16, precision="fp16")
    assert loop._precision.scaler is not None
    loop._precision.scaler._init_scale = scale
    done = []
    with Waits() as waits:  # type: ignore[no-untyped-call]
        for (x,) in loop.batches(loader):
            with loop.accumulate(model):
                loop.backward(model(x)[0].float().mean())
            done.append(loop.step(optimizer))
    assert waits.num == len(done) == 4
    assert done[0] is (scale < 65504)


def test_fp16_skips_all_optimizers_whose_gradients_were_clipped_by_a_norm_that_is_not_finite() -> None:
    """One of the two optimizers overflows; the clip makes the gradients of both NaN. A later update is made."""
    loop, model, optimizers, loader = make(8, precision="fp16")
    assert loop._precision.scaler is not None
    loop._precision.scaler._init_scale = 1024.0
    done = []
    with Waits() as waits:  # type: ignore[no-untyped-call]
        for number, (x,) in enumerate(loop.batches(loader)):
            loop.backward((model.a(x) * (1.0 if number else math.nan) + model.b(x)).float().mean())
            loop.clip_grad_norm_(model.parameters(), 1e6)
            done += [loop.step(optimizer) for optimizer in optimizers]
    assert done == [False, False, True, True]
    assert waits.num == len(done)
    assert [weight.item() for weight in model.parameters()] == pytest.approx([0.9, 0.9], rel=1e-3)


def test_fp16_takes_a_smaller_scale_within_a_batch_only_if_no_gradient_waits() -> None:
    """An overflow of one optimizer lowers the scale at once where all have stepped, and at the end where one waits."""
    loop, model, (first, second), loader = make(4, precision="fp16")
    scaler = loop._precision.scaler
    assert scaler is not None
    for (x,) in loop.batches(loader):
        loop.backward((model.a(x) * math.inf).float().mean().nan_to_num(0) + model.a(x).mean() * 1e38)
        assert not loop.step(first)
        loop.backward((model.a(x) + model.b(x)).mean())
        assert scaler.get_scale() == 32768.0
        assert loop.step(first)
        loop.backward(model.a(x).mean())
        assert loop.step(second)
    assert [model.a.weight.item(), model.b.weight.item()] == pytest.approx([0.9, 0.9], rel=1e-3)


def test_fp16_forgets_gradients_that_were_clipped_and_thrown_away() -> None:
    """A batch that is skipped by its norm leaves nothing behind for the next."""
    loop, model, (optimizer, _), loader = make(8, precision="fp16")
    for number, (x,) in enumerate(loop.batches(loader)):
        loop.backward(model.a(x).mean())
        assert loop.clip_grad_norm_(model.a.parameters(), 1e6) == pytest.approx(1.0)
        if number == 0:
            optimizer.zero_grad()
            continue
        loop.step(optimizer)
    assert model.a.weight.item() == pytest.approx(0.9)


def test_several_losses_are_weighted_by_their_counts_and_none_by_a_mean_over_nothing() -> None:
    """A NaN that is a mean over nothing adds exact zeros; NaN of something raises, by its name."""
    loop, model, _, loader = make(4)
    for (x,) in loop.batches(loader):
        a, b = model(x)
        loop.backward({"a": a.mean(), "b": (b.mean() * math.nan, 0)})
        assert gradients(model) == [1.0, 0.0]
        a, b = model(x)
        loop.backward({"a": a.mean(), "b": (b.mean() * 2, torch.tensor(3))})
        assert gradients(model) == [2.0, 2.0]
        a, b = model(x)
        with pytest.raises(LoopError, match="'b', so nothing would be trained"):
            loop.backward({"a": a.mean(), "b": b.detach().mean()})
        loop.backward({"a": a.mean(), "b": (b.mean() * math.nan, 1)})
        with pytest.raises(NonFiniteError, match="the loss 'b' is nan in epoch 0, batch 0"):
            loop.step(torch.optim.SGD(model.parameters(), lr=0.1))
        break


def test_each_of_many_losses_is_weighted_by_its_own_count() -> None:
    """Of more losses than one message holds."""
    loop, model, _, loader = make(4)
    for (x,) in loop.batches(loader):
        a, _ = model(x)
        loop.backward({str(number): (number * a.mean(), number % 2) for number in range(NUM_COUNTS + 3)})
    assert gradients(model)[0] == sum(number for number in range(NUM_COUNTS + 3) if number % 2)


def test_several_losses_are_refused_where_they_cannot_be_weighted() -> None:
    """No losses, a count beside them, counts in an accumulation group; by samples they accumulate."""
    loop, model, _, loader = make(8, accumulate=2)
    for (x,) in loop.batches(loader):
        a, b = (one.mean() for one in model(x))
        with pytest.raises(LoopError, match="without losses"):
            loop.backward({})
        with pytest.raises(LoopError, match="`count` with several"):
            loop.backward({"a": a}, count=3)
        with pytest.raises(LoopError, match="several losses with counts in an accumulation group"):
            loop.backward({"a": a, "b": (b, 3)})
        with pytest.raises(LoopError, match="a loss of shape"):
            loop.backward({"a": a, "b": b.reshape(1)})
        loop.backward({"a": a, "b": b})
    assert gradients(model) == [1.0, 1.0]
    with pytest.raises(LoopError, match="outside `batches`"):
        loop.backward({"a": model.a.weight.mean()})


def test_ranks_with_other_losses_see_that_in_what_they_add_up() -> None:
    """Counts of ranks with the same losses are summed; other names or kinds give no counts, on both ranks."""
    loss = torch.ones(())
    own = encode(read_losses({"a": loss, "b": (loss, 1)}), [3.0])
    many = {str(number): (loss, 1) for number in range(NUM_COUNTS + 1)}
    for other in ({"b": (loss, 2)}, {"a": loss, "c": (loss, 2)}, {"a": (loss, 2), "b": loss}, many):
        said = encode(read_losses(other), [5.0] * len(many if other is many else "b"))
        assert len(own) == len(said) == NUM_COUNTS + 2
        assert decode([x + y for x, y in zip(own, said, strict=True)], 2) is None
    sums = decode([x + y for x, y in zip(own, own, strict=True)], 2)
    assert sums is not None
    assert sums[0] == 6.0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_within_an_accumulation_group_are_refused(set_to_none: bool) -> None:
    """`zero_grad` at the top of the loop, as most scripts have it; between groups it is harmless."""
    loop, model, _, loader = make(16, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x,) in enumerate(loop.batches(loader)):
        if number != 1:
            optimizer.zero_grad(set_to_none=set_to_none)
        loss = torch.cat(model(x)).mean()
        if number < 3:
            loop.backward(loss)
            loop.step(optimizer)
            continue
        with pytest.raises(LoopError, match=r"cleared, by zero_grad\(\).*Remove optimizer.zero_grad"):
            loop.backward(loss)
        break


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("cleared", [0, 1])
@pytest.mark.parametrize("kind", ["two models", "two optimizers"])
def test_gradients_of_any_model_and_optimizer_that_are_cleared_within_a_group_are_refused(
    kind: str, cleared: int, set_to_none: bool
) -> None:
    """Of each of two models with a backward pass of its own; of each of two optimizers of one model."""
    loop, model, optimizers, loader = make(8, accumulate=2)
    parts = loop.prepare(model.a, model.b) if kind == "two models" else (model,)

    def train() -> None:
        for (x,) in loop.batches(loader):
            optimizers[cleared].zero_grad(set_to_none=set_to_none)
            for part in parts:
                with loop.accumulate(part):
                    loop.backward(part(x).mean() if kind == "two models" else torch.cat(model(x)).mean())
            for optimizer in optimizers:
                loop.step(optimizer)

    with pytest.raises(LoopError, match=r"cleared, by zero_grad\(\).*Remove optimizer.zero_grad"):
        train()


def test_zero_gradients_of_a_group_that_are_changed_in_place_are_no_cleared_ones() -> None:
    """The first weight's gradient is zero by itself, and all gradients are clipped in every batch."""
    loop, model, _, loader = make(8, accumulate=2)
    optimizer = loop.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in loop.batches(loader):
        a, b = model(x)
        loop.backward((a * 0 + b).mean())
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        loop.step(optimizer)
    assert [weight.item() for weight in model.parameters()] == pytest.approx([1.0, 0.9])


def test_a_second_backward_of_a_step_and_changed_gradients_are_no_cleared_ones() -> None:
    """Two models with a step each in the last batch of a group; gradients clipped in every batch."""
    loop, model, optimizers, loader = make(8, accumulate=2)
    for (x,) in loop.batches(loader):
        for part, optimizer in zip((model.a, model.b), optimizers, strict=True):
            loop.backward(part(x).mean())
            nn.utils.clip_grad_value_(part.parameters(), 0.4)
            loop.step(optimizer)
    assert [weight.item() for weight in model.parameters()] == pytest.approx([0.96, 0.96])


@pytest.mark.parametrize("clears", ["not", "to none", "to zeros"])
@pytest.mark.parametrize("num_accumulated", [1, 2])
def test_gradients_left_from_before_a_step_of_another_optimizer_are_refused(clears: str, num_accumulated: int) -> None:
    """The second pass leaves a gradient in `a`, as a GAN's generator does in the discriminator. `b` may step late."""
    loop, model, (of_a, of_b), loader = make(8 * num_accumulated, accumulate=num_accumulated)
    for number, (x,) in enumerate(loop.batches(loader)):
        if clears != "not" and number % num_accumulated == 0:
            of_a.zero_grad(set_to_none=clears == "to none")
        loop.backward(model.a(x).mean())
        if clears == "not" and number == 2 * num_accumulated - 1:
            with pytest.raises(LoopError, match=r"gradients of Two contain.*different optimizer.*zero_grad\(\)"):
                loop.step(of_a)
            return
        loop.step(of_a)
        loop.backward((model.a(x) + model.b(x)).mean() if loop.is_update else model.b(x).mean())
        loop.step(of_b)
    assert [weight.item() for weight in model.parameters()] == pytest.approx([0.8, 0.8])


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("num_accumulated", [1, 2])
def test_gradients_of_parameters_that_an_optimizer_gets_later_must_be_cleared(
    clears: bool, num_accumulated: int
) -> None:
    """`add_param_group` between updates: no optimizer had the parameter before, so its gradients were added up."""
    loop, model, _, loader = make(8 * num_accumulated, accumulate=num_accumulated)
    optimizer = torch.optim.SGD([model.a.weight], lr=0.1)
    for number, (x,) in enumerate(loop.batches(loader)):
        if number == num_accumulated:
            optimizer.add_param_group({"params": [model.b.weight]})
            if clears:
                optimizer.zero_grad()
        loop.backward(torch.cat(model(x)).mean())
        if number == 2 * num_accumulated - 1 and not clears:
            with pytest.raises(LoopError, match=r"1 of the 2 parameters of this SGD were added.*zero_grad\(\) right"):
                loop.step(optimizer)
            return
        loop.step(optimizer)
    assert [weight.item() for weight in model.parameters()] == pytest.approx([0.9, 0.95])


def test_gradients_that_no_later_pass_adds_to_are_applied_after_steps_of_other_optimizers() -> None:
    """Of one backward pass, with a pass of the other weight in between; and of two passes before both steps."""
    loop, model, (of_a, of_b), loader = make(8)
    for (x,) in loop.batches(loader):
        loop.backward(torch.cat(model(x)).mean())
        loop.step(of_a)
        loop.backward(model.a(x).mean())
        loop.step(of_a)
        loop.backward(model.a(x).mean())
        loop.step(of_b)
        of_a.zero_grad()
        loop.backward(torch.cat(model(x)).mean())
        loop.backward(torch.cat(model(x)).mean())
        loop.step(of_a)
        loop.step(of_b)
    # each batch: a by 0.05, 0.1 and twice 0.05; b by 0.05 and twice 0.05
    assert [weight.item() for weight in model.parameters()] == pytest.approx([0.5, 0.7])


def test_two_backward_passes_of_one_forward_are_refused_on_one_rank_too() -> None:
    """On several they would be: gradients cross once. Of two forward passes they are fine."""
    loop, model, _, loader = make(8)
    for number, (x,) in enumerate(loop.batches(loader)):
        a, b = model(x * model.b.weight)
        if number == 0:
            loop.backward(a.mean(), retain_graph=True)
            with pytest.raises(LoopError, match="earlier backward pass.*call backward once"):
                loop.backward(b.mean())
            continue
        loop.backward(a.mean(), retain_graph=True)
        a, b = model(x)
        loop.backward(b.mean(), retain_graph=True)
        shared = x.clone().requires_grad_() * 2
        loop.backward((model.a(shared)).mean(), retain_graph=True)
        loop.backward((model.b(shared)).mean())


def test_gather_batch_and_gather_of_one_rank_refuse_what_has_no_rows() -> None:
    """So that it is found on one rank first."""
    loop, model, _, _ = make()
    rows = model.a.weight
    assert loop.gather_batch(rows) == (rows, 0)
    with pytest.raises(LoopError, match=r"a tensor of shape \(\)"):
        loop.gather_batch(torch.ones(()))
    with pytest.raises(LoopError, match="a list"):
        loop.gather_batch([1])  # type: ignore[arg-type]
    with pytest.raises(LoopError, match="which has no rows"):
        loop.gather(torch.ones(()))
    assert loop.gather([1, 2]) == [1, 2]


def test_closures_and_plateaus_that_cannot_work_are_refused() -> None:
    """An optimizer without its closure, a closure with accumulation or fp16 or no loop.backward, a lonely scheduler."""
    loop, model, (optimizer, _), loader = make(4)
    lbfgs = torch.optim.LBFGS(model.parameters())
    for (x,) in loop.batches(loader):
        loop.backward(torch.cat(model(x)).mean())
        with pytest.raises(LoopError, match="LBFGS requires a closure.*closure=closure"):
            loop.step(lbfgs)
        with pytest.raises(LoopError, match="the closure did not call"):
            loop.step(lbfgs, closure=lambda: torch.cat(model(torch.ones(4, 1))).mean().backward())  # type: ignore[no-untyped-call]
        with pytest.raises(LoopError, match=r"was not prepared.*loop.prepare\(scheduler\)"):
            loop.step(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    for options, said in (({"accumulate": 2}, "`accumulate` is 2"), ({"precision": "fp16"}, "'fp16', whose")):
        loop, _, (optimizer, _), loader = make(8, **options)
        with pytest.raises(LoopError, match=said):
            [loop.step(optimizer, closure=lambda: None) for _ in loop.batches(loader)]


def test_training_continues_after_a_nonfinite_error_that_is_caught() -> None:
    """The gradients stay to be looked at, and the next backward pass begins without them: one update is left out."""
    loop, model, (optimizer, _), loader = make(16)
    left_out, moved = [], []
    for number, (x,) in enumerate(loop.batches(loader)):
        before = model.a.weight.item()
        try:
            with loop.accumulate(model):
                loop.backward((model(x)[0] * (math.nan if number == 1 else 1.0)).mean())
            loop.step(optimizer)
        except NonFiniteError:
            left_out.append((number, math.isnan(gradients(model)[0])))
        moved.append(before - model.a.weight.item())
    assert left_out == [(1, True)]
    assert moved == pytest.approx([0.1, 0.0, 0.1, 0.1])


def test_a_step_after_a_clip_that_found_nan_raises_as_well() -> None:
    """The weights stay as they were if the program catches the error of the clip and steps."""
    loop, model, (optimizer, _), loader = make(8)
    raised: list[str] = []
    for (x,) in loop.batches(loader):
        loop.backward(model(x)[0].mean() * (1.0 if raised else math.nan))
        for update in (lambda: loop.clip_grad_norm_(model.a.parameters(), 1.0), lambda: loop.step(optimizer)):
            try:
                update()
            except NonFiniteError as error:
                raised.append(error.did)
    assert raised == ["computing the loss", "computing gradients"]
    assert model.a.weight.item() == pytest.approx(0.9)
