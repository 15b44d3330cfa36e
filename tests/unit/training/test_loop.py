# SPDX-License-Identifier: Apache-2.0
"""`Loop` on one rank: its arguments, its place in the epochs, its random state, and what it refuses."""

from __future__ import annotations

import gc
import math
import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddpilot import FakeGroup
from ddpilot.data.loaders import MapLoader
from ddpilot.data.shards.loader import ShardLoader
from ddpilot.data.stream_loader import StreamLoader
from ddpilot.errors import LoopError, NonFiniteError
from ddpilot.training.checks.nonfinite import FiniteCheck
from ddpilot.training.loop import Loop

AnyLoader = MapLoader | StreamLoader | ShardLoader


pytestmark = pytest.mark.usefixtures("compiler_is_loaded")


def make(num_samples: int = 10, **options: Any) -> tuple[Loop, nn.Module, torch.optim.Optimizer, AnyLoader]:
    """A loop alone, with a model and a loader of batches of four."""
    loop = Loop(group=FakeGroup(), **options)
    model = nn.Linear(1, 1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.arange(float(num_samples)).reshape(-1, 1))
    return loop, model, optimizer, loop.loader(data, global_batch_size=4)


def test_loop_makes_the_same_model_for_a_seed() -> None:
    """On every rank, before anything is wrapped."""
    weights = []
    for rank in (0, 1):
        Loop(seed=5, group=FakeGroup(rank, 2))
        weights.append(nn.Linear(3, 3).weight)
    assert torch.equal(*weights)


def test_without_a_seed_of_its_own_a_loader_has_that_of_the_loop() -> None:
    """Left out, or None; also of a DataLoader."""
    data = TensorDataset(torch.arange(30.0).reshape(-1, 1))
    orders = []
    given: list[dict[str, Any]] = [{}, {"seed": None}, {"seed": 11}, {"seed": 0}]
    for options in given:
        loop = Loop(seed=11, group=FakeGroup(0, 1))
        loaders = (
            loop.loader(data, global_batch_size=30, shuffle=True, **options),
            loop.prepare_data_loader(DataLoader(data, 30, shuffle=True), **options),
        )
        orders.append([batch.flatten().tolist() for loader in loaders for (batch,) in loop.batches(loader)])
    assert orders[0] == orders[1] == orders[2] != orders[3]


def test_epochs_draw_other_dropout_on_each_rank_and_the_same_choices_in_python() -> None:
    """torch's state depends on rank and epoch; `random` and numpy on the epoch alone. The same again for a seed."""
    drawn: dict[tuple[int, int], tuple[float, float, float]] = {}
    for rank in (0, 1, 0):
        loop = Loop(seed=5, group=FakeGroup(rank, 2))
        loader = loop.loader(TensorDataset(torch.ones(4, 1)), global_batch_size=4)
        for epoch in loop.epochs(2):
            for _ in loop.batches(loader):
                values = torch.rand(()).item(), random.random(), float(np.random.rand())
                assert drawn.setdefault((rank, epoch), values) == values
    assert len({torch_value for torch_value, _, _ in drawn.values()}) == 4
    assert drawn[0, 0][1:] == drawn[1, 0][1:] != drawn[0, 1][1:]


def test_each_pass_outside_of_epochs_has_another_order() -> None:
    """As if `epochs` counted them, with a second loader beside it too, and with other dropout."""

    def passes(loop: Loop) -> list[list[float]]:
        data = TensorDataset(torch.arange(8.0).reshape(-1, 1))
        seen = []
        for _ in range(3):
            loader = loop.loader(data, global_batch_size=4, shuffle=True)
            seen.append([*torch.cat([x for (x,) in loop.batches(loader)]).flatten().tolist(), torch.rand(()).item()])
            assert len(list(loop.batches(loop.loader(data, global_batch_size=8)))) == 1
        return seen

    loop, counted = Loop(group=FakeGroup()), Loop(group=FakeGroup())
    loader = loop.loader(TensorDataset(torch.arange(8.0).reshape(-1, 1)), global_batch_size=4, shuffle=True)
    seen = passes(loop)
    expected = [[*torch.cat([x for (x,) in counted.batches(loader)]).flatten().tolist()] for _ in counted.epochs(3)]
    assert [order[:-1] for order in seen] == expected
    assert len({tuple(order) for order in expected}) == len({order[-1] for order in seen}) == 3
    assert loop.epoch == 2
    assert list(loop.epochs(2)) == [0, 1]
    loop.epoch = 1
    assert passes(loop)[0] == seen[1]
    assert len(list(loop.batches(loader))) == 2
    loop.stop(everywhere=True)
    assert list(loop.batches(loader)) == []


def test_batches_leave_after_an_update_and_go_on_there() -> None:
    """A stop in batch 1 of groups of two ends after batch 1 of 3; another loop with that place does the rest."""
    loop, _, _, loader = make(16, accumulate=2)
    seen = []
    for epoch in loop.epochs(2):
        for number, (x,) in enumerate(loop.batches(loader)):
            seen.append((epoch, x.flatten().tolist()))
            if number == 0:
                loop.stop()
    assert (loop.epoch, loop.next_batch, loop.stop_reasons) == (0, 2, ("asked",))
    again, *_ = make(16, accumulate=2)
    again.epoch, again.next_batch = loop.epoch, loop.next_batch
    for epoch in again.epochs(1):
        seen += [(epoch, x.flatten().tolist()) for (x,) in again.batches(loader)]
    assert seen == [(0, [float(i) for i in range(start, start + 4)]) for start in range(0, 16, 4)]
    assert (again.epoch, again.next_batch) == (1, 0)


def test_step_and_clip_do_nothing_while_gradients_are_accumulated() -> None:
    """The scheduler steps once per update; three batches in groups of two are two updates."""
    loop, model, optimizer, loader = make(accumulate=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    done, norms = [], []
    for (x,) in loop.batches(loader):
        with loop.accumulate(model):
            loop.backward(model(x).mean())
        norms.append(loop.clip_grad_norm_(model.parameters(), 1.0) is not None)
        done.append(loop.step(optimizer, schedule))
    assert done == norms == [False, True, True]
    assert (loop.num_updates, schedule.get_last_lr()) == (2, [0.025])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_autocast_is_on_in_accumulate_and_off_in_backward() -> None:
    """bf16 for the forward pass and the loss; gradients and weights stay in float32."""
    loop, model, _, loader = make(precision="bf16")
    dtypes = []
    for (x,) in loop.batches(loader):
        with loop.accumulate(model):
            out = model(x)
            out.register_hook(lambda grad: dtypes.append(torch.is_autocast_enabled("cpu")))
            loop.backward(out.float().mean())
        dtypes.append(out.dtype)
    assert dtypes == [False, torch.bfloat16] * 3
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_an_interrupt_ends_the_loop_after_the_update() -> None:
    """What was learnt so far is there, and the handler is Python's own again."""
    loop, model, optimizer, loader = make(40)
    for (x,) in loop.batches(loader):
        loop.backward(model(x).mean())
        loop.step(optimizer)
        if loop.num_updates == 1:
            signal.raise_signal(signal.SIGINT)
    assert (loop.num_updates, loop.should_stop, loop.stop_reasons) == (2, True, ("SIGINT",))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_loss_that_is_not_finite_is_an_error_only_where_it_is_asked_for() -> None:
    """Without the check, training goes on."""
    loop, model, optimizer, loader = make(check_finite=False)
    for (x,) in loop.batches(loader):
        loop.backward(model(x).mean() * float("nan"))
        loop.clip_grad_norm_(model.parameters(), 1.0)
        loop.step(optimizer)
    loop, model, _, loader = make()
    batches = loop.batches(loader)
    (x,) = next(batches)
    loop.backward(model(x).mean() * float("nan"))
    with pytest.raises(NonFiniteError, match="on rank 0 the loss is nan in epoch 0, batch 0, of samples 0, 1, 2, 3;"):
        next(batches)


def test_backward_refuses_what_it_cannot_weight() -> None:
    """A loss per sample; a loss outside of batches without a count; a count whose gradients it does not know."""
    loop, model, _, loader = make(accumulate=2)
    with pytest.raises(LoopError, match="outside `batches`, so the number of samples is unknown"):
        loop.backward(model(torch.ones(1, 1)).mean())
    loop.backward(model(torch.ones(1, 1)).mean(), count=1)
    batches = loop.batches(loader)
    for (x,) in batches:
        with pytest.raises(LoopError, match=r"a loss of shape \(4, 1\)"):
            loop.backward(model(x))
        with pytest.raises(LoopError, match="outside of `accumulate`, so the model is unknown"):
            loop.backward(model(x).mean(), count=4)
        with loop.accumulate(model):
            loop.backward(model(x).mean(), count=4)
            with pytest.raises(LoopError, match="two losses with `count=` for one model"):
                loop.backward(model(x).mean(), count=4)
        break
    batches.close()  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="left within an accumulation group"):
        next(loop.batches(loader))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"accumulate": 0}, "`accumulate` is 0"),
        ({"accumulate": 1.5}, "`accumulate` is 1.5"),
        ({"precision": "fp8"}, r"^\[rank 0\] .*`precision` is 'fp8'"),
        ({"comm": "bf16"}, "^making a Loop: `comm='bf16'`"),
        ({"max_time_s": -1}, "`max_time_s` is -1"),
        ({"seed": None}, "`seed` is None"),
        ({"seed": 1.5}, "`seed` is 1.5"),
        ({"checkpoints": "c"}, "^making a Loop: `checkpoints='c'`. Did you mean `checkpoint_dir`"),
    ],
)
def test_loop_refuses_arguments_that_make_no_sense(options: dict[str, Any], found: str) -> None:
    """With what was given."""
    with pytest.raises(LoopError, match=found):
        Loop(group=FakeGroup(), **options)


def test_a_refused_argument_names_the_rank_that_is_not_in_a_group_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun the variables tell it."""
    numbers = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LoopError, match=r"^\[rank 1\] making a Loop: `seed` is 'x'"):
        Loop(seed="x")  # type: ignore[arg-type]


def test_fp16_has_the_same_numbers_in_16_bits_at_any_world_size() -> None:
    """So it overflows with the same batches; what the optimizer applies has the true size."""
    found = {}
    for world_size in (1, 2):
        loop = Loop(seed=1, precision="fp16", group=FakeGroup(0, world_size))
        model = nn.Linear(1, 1)
        model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = model.bias.item()
        for (x,) in loop.batches(loop.loader(TensorDataset(torch.ones(4, 1)), global_batch_size=4)):
            with loop.accumulate(model):
                output = model(x)
                output.retain_grad()
                loop.backward(output.float().mean() / 2)
            assert loop.step(optimizer)
        found[world_size] = torch.as_tensor(output.grad)[0].item(), before - model.bias.item()
    assert found[1] == (65536.0 / 8, 0.5)
    assert found[2] == found[1]  # the fake ranks are alike


def test_reduce_weights_the_last_loss_after_its_loop_too() -> None:
    """By the samples of its batch; whatever else is reduced there counts as one on each rank."""
    loop, model, _, loader = make(6)
    for (x,) in loop.batches(loader):
        loss = model(x).mean()
        loop.backward(loss)
    assert loop._updates.count_behind(loss) == 2.0
    assert loop._updates.count_behind(loss.detach()) == 1.0


def test_prepare_and_reduce_refuse_what_they_do_not_know() -> None:
    """Each says what it takes."""
    loop, model, *_ = make()
    wrong: Any = "x"
    with pytest.raises(LoopError, match=r"^\[rank 0\] updating the weights: a str in place of an optimizer"):
        loop.step(wrong)
    with pytest.raises(LoopError, match=r"^\[rank 0\] reducing a value over ranks: 'x', which cannot be converted"):
        loop.reduce(wrong)
    with pytest.raises(LoopError, match="`count` is -3"):
        loop.backward(torch.ones((), requires_grad=True), count=-3)
    with pytest.raises(LoopError, match="preparing: a list. Pass models, optimizers"):
        loop.prepare([model])
    with pytest.raises(LoopError, match="`op` is 'median'"):
        loop.reduce(1.0, "median")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (torch.Tensor.detach, "a loss without a gradient"),
        (torch.Tensor.item, "a float instead of a loss"),
        (lambda loss: loss.expand(3), r"a loss of shape \(3,\)"),
    ],
)
def test_a_loss_that_trains_nothing_is_refused_with_its_batch(spoil: Any, found: str) -> None:
    """Before torch says something of the graph; the rank, the batch and what to do are named."""
    loop, model, _, loader = make()
    for (x,) in loop.batches(loader):
        with (
            pytest.raises(LoopError, match=rf"^\[rank 0\] running backward in batch 0 of epoch 0: {found}.*\. \w"),
            loop.accumulate(model),
        ):
            loop.backward(spoil(model(x).mean()))
        break


def test_options_and_tracked_things_that_are_refused_name_the_rank() -> None:
    """As every other error of one rank does."""
    loop, model, *_ = make()
    with pytest.raises(LoopError, match=r"^\[rank 0\] preparing a model: no option `bucket_cap`. Did you mean"):
        loop.prepare(model, bucket_cap=3)
    with pytest.raises(LoopError, match=r"^\[rank 0\] adding to the state that a run saves: a int"):
        loop.track(number=3)


def test_reduce_and_gather_alone_give_back_what_they_got() -> None:
    """In float64 for a number, in its own dtype for a tensor."""
    loop, *_ = make()
    assert (loop.reduce(0.1).item(), loop.reduce(0.1).dtype) == (0.1, torch.float64)
    assert loop.reduce(torch.ones(2)).dtype == torch.float32
    assert loop.gather([1, 2]) == [1, 2]


def test_evaluate_restores_modes_and_refuses_metrics_it_cannot_use() -> None:
    """Layers that were frozen in eval mode stay so."""
    loop, _, _, loader = make()
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    model[1].eval()
    only_x = {"forward": lambda m, batch: (m(batch[0]),)}
    assert loop.evaluate(model, loader, {"mean": lambda y: y}, **only_x) == {"mean": 4.5}
    assert [layer.training for layer in (model, model[0], model[1])] == [True, True, False]
    with pytest.raises(LoopError, match="a tensor of shape \\(1,\\) for 4 samples"):
        loop.evaluate(model, loader, {"bad": lambda y: torch.ones(1)}, **only_x)
    with pytest.raises(LoopError, match="evaluating the metric 'bad': it is a int"):
        loop.evaluate(model, loader, {"bad": 3}, **only_x)
    with pytest.raises(LoopError, match="it is a list of one item: there is no target. Pass `forward="):
        loop.evaluate(model, loader, {"mean": lambda y, target: y})


@pytest.mark.parametrize(
    ("metric", "text", "cause"),
    [
        (lambda y: "good", "it returned 'good', a str. Return one value per sample", None),
        (lambda y: (1, 2, 3), r"it returned \(1, 2, 3\), a tuple", None),
        (lambda y: {0: y}[7], "it raised KeyError: 7. It is called with what `forward` returns", KeyError),
        (lambda y, target: y, "it raised TypeError: .* missing 1 required positional argument", TypeError),
    ],
)
def test_evaluate_names_the_metric_that_fails(metric: Any, text: str, cause: Any) -> None:
    """With the batch and the rank, and the original as its cause."""
    loop, _, _, loader = make()
    with pytest.raises(LoopError, match=rf"^\[rank 0\] evaluating the metric 'bad' for batch 0: {text}") as caught:
        loop.evaluate(nn.Identity(), loader, {"bad": metric}, forward=lambda m, batch: (m(batch[0]),))
    assert type(caught.value.__cause__) is (cause or type(None))
    with pytest.raises(LoopError, match="`metrics` is a function. Give a dict"):
        loop.evaluate(nn.Identity(), loader, metric)


def test_predict_of_a_shuffled_loader_comes_in_the_order_of_the_dataset() -> None:
    """By the samples' numbers."""
    loop, *_ = make()
    data = TensorDataset(torch.arange(10.0))
    loader = loop.loader(data, global_batch_size=4, shuffle=True)
    assert loop.predict(nn.Identity(), loader).tolist() == list(range(10))


def test_explain_says_what_is_not_wrapped_and_why() -> None:
    """Also of what torch.compile made of it; and what an optimizer's state takes."""
    loop, model, optimizer, _ = make()
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    loop.prepare(torch.compile(nn.Bilinear(1, 1, 1), backend="eager"))
    linear, bilinear, sgd = str(loop.explain()).split("\n\n")
    assert linear == "Linear: not wrapped in DDP, as world_size is 1"
    assert bilinear.startswith("Bilinear: not wrapped")
    assert sgd == "SGD: unchanged\n  state: 0 bytes"


def test_explain_tells_models_of_one_class_apart() -> None:
    """By the names that they have in checkpoints, which the user may have given."""
    loop = Loop(group=FakeGroup())
    generator, critic, net = nn.Linear(1, 1), nn.Linear(1, 1), nn.Bilinear(1, 1, 1)
    steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    loop.prepare(generator, critic, net, *steps)
    loop.track(generator=generator)
    titles = [part.title.split(":")[0] for part in loop.explain().parts]
    assert titles == ["Linear (generator)", "Linear (model2)", "Bilinear", "SGD (optimizer)", "SGD (optimizer2)"]


def test_shard_says_how_a_batch_size_is_read_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the training and the test data have a loader each."""
    loop = Loop(group=FakeGroup(world_size=2))
    for _ in range(2):
        loop.prepare_data_loader(DataLoader(TensorDataset(torch.ones(8)), batch_size=4))
    loop.prepare_data_loader(DataLoader(TensorDataset(torch.ones(8)), batch_size=6))
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" samples")[0].rpartition(" ")[2] for line in said] == ["4", "6"]


def test_what_was_not_prepared_is_refused_before_it_is_trained() -> None:
    """A model in `accumulate`; an optimizer in `step`, also one that got another group later. Alone too."""
    loop, model, optimizer, loader = make()
    other = nn.Linear(1, 1)
    with pytest.raises(LoopError, match="weight, bias of this Linear were never passed to prepare.*= loop.prepare"):
        loop.accumulate(other)
    lonely = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(LoopError, match=r"2 of the 2 parameters of this SGD \(shapes \(1, 1\), \(1,\)\) belong to"):
        loop.step(lonely)
    other.requires_grad_(False)
    loop.step(torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))  # what is frozen is not trained
    compiled: Any = torch.compile(model, backend="eager")
    for (x,) in loop.batches(loader):
        with loop.accumulate(compiled):
            loop.backward(model(x).mean())
        loop.step(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(()))]})
    with pytest.raises(LoopError, match="1 of the 3 parameters"):
        loop.step(optimizer)


def test_gradients_of_a_plain_backward_are_refused() -> None:
    """In `batches`, before the weights change; several steps after one backward are fine."""
    loop, model, optimizer, loader = make(accumulate=2)
    before = model.state_dict()["weight"].clone()
    for (x,) in loop.batches(loader):
        loop.backward(model(x).mean())
        if loop.is_update:
            assert loop.step(optimizer)
            loop.step(optimizer)
    changed = model.state_dict()["weight"].clone()
    assert not torch.equal(before, changed)
    batches = loop.batches(loader)
    for (x,) in batches:
        model(x).mean().backward()
        if loop.is_update:
            break
    with pytest.raises(LoopError, match=r"no loop.backward.*batch 1 of epoch 1.*instead of loss.backward"):
        loop.step(optimizer)
    assert torch.equal(model.state_dict()["weight"], changed)


def test_a_plain_dataloader_is_refused_for_training_and_taken_for_evaluation() -> None:
    """There its batches are only a way to read every sample once."""
    loop = Loop(group=FakeGroup())
    plain = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=3, shuffle=True)
    with pytest.raises(LoopError, match=r"a DataLoader, .*Pass loop.prepare_data_loader\(loader\)"):
        next(loop.batches(plain))  # type: ignore[arg-type]
    with pytest.raises(LoopError, match=r"a DataLoader.*loop.prepare_data_loader\(loader\)"):
        loop.loader(plain, global_batch_size=4)
    mean = loop.evaluate(nn.Identity(), plain, {"mean": lambda x: x}, forward=lambda model, batch: (model(batch[0]),))
    assert mean == {"mean": 4.5}
    assert loop.predict(nn.Identity(), plain).tolist() == list(range(10))


def test_leaving_an_accumulation_group_is_said_at_the_line_that_did_it_and_not_after_an_error() -> None:
    """An error says what it is by itself; a `break` is said when training goes on."""
    loop, model, _, loader = make(accumulate=2)

    def leave(error: bool) -> int:
        for (x,) in loop.batches(loader):
            loop.backward(model(x).mean())
            if error:
                raise ValueError("mine")
            break
        return sys._getframe().f_lineno

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="mine"):
            leave(error=True)
        gc.collect()
    assert caught == []
    loop, model, _, loader = make(accumulate=2)
    with pytest.warns(UserWarning, match="left within an accumulation group") as said:
        lines = [leave(error=False) for _ in loop.epochs(1)]
    assert (said[0].filename, said[0].lineno) == (__file__, lines[0] - 1)


def test_a_finding_is_said_at_the_line_of_the_loop_over_batches() -> None:
    """And not at one of the launcher's."""
    loop = Loop(group=FakeGroup(world_size=2))
    loop.prepare(nn.BatchNorm1d(1))
    batches = loop.batches(loop.loader(TensorDataset(torch.ones(8, 1)), global_batch_size=8))
    with pytest.warns(UserWarning, match="DDP501") as said:
        next(batches)
    assert (said[0].filename, said[0].lineno) == (__file__, sys._getframe().f_lineno - 1)


def make_alone(**options: Any) -> tuple[Loop, nn.Module, torch.optim.Optimizer]:
    """A loop alone, with a model."""
    loop = Loop(group=FakeGroup(), progress=False, **options)
    model = nn.Linear(1, 1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return loop, model, optimizer


def make_loader(loop: Loop, offset: float = 0.0) -> Any:
    """Eight samples in batches of four."""
    return loop.loader(TensorDataset(torch.arange(8.0).reshape(-1, 1) + offset), global_batch_size=4)


def train(loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """A pass."""
    for (x,) in loop.batches(loader):
        loop.backward(model(x).square().mean())
        loop.step(optimizer)


def test_two_passes_open_at_once_are_refused() -> None:
    """`zip` of two; one inside a batch of another that has ended, or one that was left open before, is fine."""
    loop, _, _ = make_alone()
    first, second = make_loader(loop), make_loader(loop, 10.0)
    opened: Any = loop.batches(first)
    next(opened)
    with pytest.raises(LoopError, match=r"a second loop.batches\(\).*for x, y in loop.batches\(a, b\)"):
        list(zip(loop.batches(first), loop.batches(second), strict=True))
    seen = [[len(list(loop.batches(second))) for _ in loop.batches(first)] for _ in loop.epochs(1)]
    assert seen == [[2, 2]]
    opened.close()
    assert loop.batch is None


def test_passes_over_two_datasets_of_one_shape_are_one_epoch() -> None:
    """In a loop over range(); a dataset made for each epoch counts as the same."""
    loop, _, _ = make_alone()
    first, second = make_loader(loop), make_loader(loop, 10.0)
    seen = []
    for _ in range(3):
        for loader in (first, second):
            list(loop.batches(loader))
            seen.append(loop.epoch)
    assert seen == [0, 0, 1, 1, 2, 2]
    loop, _, _ = make_alone()
    seen = []
    for _ in range(3):
        list(loop.batches(make_loader(loop)))
        seen.append(loop.epoch)
    assert seen == [0, 1, 2]


def test_passes_over_two_datasets_made_in_each_epoch_are_one_epoch() -> None:
    """The line of the program tells them apart, also that of a call of a function."""
    loop, model, optimizer = make_alone()
    seen = []
    for _ in range(3):
        train(loop, model, optimizer, make_loader(loop))
        seen.append(loop.epoch)
        train(loop, model, optimizer, make_loader(loop, 10.0))
        seen.append(loop.epoch)
        list(loop.batches(make_loader(loop, 20.0)))
        seen.append(loop.epoch)
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_an_optimizer_with_all_parameters_of_an_earlier_one_takes_its_place() -> None:
    """In the count of updates and in checkpoints, with its schedulers; one that was replaced steps no more."""
    loop, model, old = make_alone()
    loop.prepare(torch.optim.lr_scheduler.ExponentialLR(old, 0.9))
    loader = make_loader(loop)
    train(loop, model, old, loader)
    new = loop.prepare(torch.optim.Adam(model.parameters()))
    train(loop, model, new, loader)
    assert loop.num_updates == 4
    assert list(loop._tracked._objects) == ["logged", "model", "optimizer"]
    assert loop._tracked.name_of(new) == "optimizer"
    assert [part.title for part in loop.explain().parts][1:] == ["Adam: unchanged"]
    with pytest.raises(LoopError, match="this SGD was replaced.*in one call"):
        loop.step(old)
    both = [torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.2)]
    loop.prepare(*both)
    assert list(loop._tracked._objects) == ["logged", "model", "optimizer", "optimizer2"]
    train(loop, model, both[0], loader)
    assert loop.num_updates == 6


def test_an_optimizer_whose_gradients_one_of_the_same_parameters_has_cleared_is_refused() -> None:
    """In one call of `prepare` or two, of all parameters or a part; used in turn, both are fine."""
    loop, model, first = make_alone()
    second = loop.prepare(torch.optim.Adam(list(model.parameters())[:1]))
    for (x,) in loop.batches(make_loader(loop)):
        for optimizer, other in ((first, second), (second, first)):
            loop.backward(model(x).mean())
            loop.step(optimizer)
            with pytest.raises(
                LoopError, match=r"parameters of a different optimizer.*would not change them.*Give each"
            ):
                loop.step(other)
            second.zero_grad()
            first.zero_grad()


def test_updates_are_counted_whichever_optimizers_step() -> None:
    """An optimizer of a part of the parameters that replaces one of all; two per batch; one twice per batch."""
    loop, model, old = make_alone()
    loader = make_loader(loop)
    train(loop, model, old, loader)
    weight, bias = model.parameters()
    part = loop.prepare(torch.optim.Adam([bias]))
    weight.requires_grad_(False)
    train(loop, model, part, loader)
    weight.requires_grad_(True)
    assert loop.num_updates == 4
    other = loop.prepare(torch.optim.SGD([weight], lr=0.1))
    for (x,) in loop.batches(loader):
        loop.backward(model(x).mean())
        for optimizer in (other, part, other, part):
            loop.step(optimizer)
    assert loop.num_updates == 8
    loop.backward(model(torch.ones(1, 1)).mean(), count=1)
    loop.step(part)
    loop.step(other)
    assert loop.num_updates == 9


class Pair(nn.Module):
    """Takes one or two inputs, and draws in `eval()` too."""

    def forward(self, a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        """a, b: (samples, 1)."""
        torch.randn(3)
        return a if b is None else a + 100 * b


def test_evaluate_and_predict_call_the_model_with_all_but_the_target() -> None:
    """As a Trainer does: of three items two are inputs, a mapping is keyword arguments."""
    loop, _, _ = make_alone()
    x = torch.arange(4.0).reshape(-1, 1)
    three, one = (loop.loader(TensorDataset(*[x] * num), global_batch_size=2) for num in (3, 1))
    assert loop.predict(Pair(), three).flatten().tolist() == [0, 101, 202, 303]
    assert loop.predict(Pair(), one).flatten().tolist() == [0, 1, 2, 3]
    error = {"error": lambda output, target: output - target}
    assert loop.evaluate(Pair(), three, error) == {"error": 150.0}
    named: Any = [{"a": value, "b": value} for value in x]
    mappings = loop.loader(named, global_batch_size=2)
    assert loop.predict(Pair(), mappings).flatten().tolist() == [0, 101, 202, 303]
    mean = {"mean": lambda output, batch: output - batch["a"]}
    assert loop.evaluate(Pair(), mappings, mean) == {"mean": 150.0}


def test_evaluate_and_predict_leave_the_random_state_as_it_was() -> None:
    """A model that draws in `eval()` does not change the training that follows."""
    loop, _, _ = make_alone()
    loader = make_loader(loop)
    before = torch.get_rng_state()
    loop.predict(Pair(), loader)
    loop.evaluate(Pair(), loader, {"mean": lambda x: x}, forward=lambda model, batch: (model(batch[0]),))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_dir_without_epochs_is_said_once_unless_the_user_saves(tmp_path: Path) -> None:
    """In the second epoch, or at the first update where there is a checkpoint that nobody resumed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for how in ("save", "resume", "epochs", "one epoch"):
            parts = make_alone(checkpoint_dir=tmp_path / how)
            loader = make_loader(parts[0])
            if how == "resume":
                parts[0].resume()
            for _ in parts[0].epochs(2) if how == "epochs" else range(1 if how == "one epoch" else 3):
                train(*parts, loader)
                if how == "save":
                    parts[0].save()
    assert [str(one.message) for one in caught] == []
    for folder, num_before in (("nothing", 1), ("save", 0)):
        parts = make_alone(checkpoint_dir=tmp_path / folder)
        loader = make_loader(parts[0])
        for _ in range(num_before):
            train(*parts, loader)
        with pytest.warns(UserWarning, match=r"trains outside of loop.epochs\(\)") as said:
            train(*parts, loader)
        train(*parts, loader)
        assert len(said) == 1


class Behind:
    """Stands for a device that the host runs ahead of: a number arrives only when the host waits for it."""

    is_there = False

    def __init__(self, number: torch.Tensor | None = None) -> None:
        self.number = number

    def send(self, number: torch.Tensor) -> Behind:
        """As `Sender.send`."""
        return Behind(number)

    def read(self) -> float:
        """As `Arriving.read`."""
        assert self.number is not None
        return self.number.item()


def break_after_nan(loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A pass that ends by `break` after an update with a loss that is NaN."""
    for (x,) in loop.batches(make_loader(loop)):
        loop.backward(model(x).mean() * math.nan)
        loop.step(optimizer)
        break


@pytest.mark.parametrize(
    "call",
    [
        lambda loop, _: loop.reduce(1.0),
        lambda loop, _: loop.gather([1.0]),
        lambda loop, model: loop.evaluate(model, make_loader(loop), {"a": lambda out: out[:, 0]}, forward=outputs),
        lambda loop, model: loop.predict(model, make_loader(loop)),
        lambda loop, _: list(loop.batches(make_loader(loop))),
        lambda loop, _: list(loop.epochs(1)),
    ],
    ids=["reduce", "gather", "evaluate", "predict", "batches", "epochs"],
)
def test_nan_before_a_break_is_raised_by_the_next_collective_call(call: Callable[[Loop, nn.Module], Any]) -> None:
    """Once, on an accelerator, whose checks have not arrived at the `break`; the weights remain finite."""
    loop, model, optimizer = make_alone()
    loop._updates._finite = FiniteCheck(torch.device("cuda"), Behind())  # type: ignore[arg-type]
    break_after_nan(loop, model, optimizer)
    with pytest.raises(NonFiniteError, match="the loss is nan in epoch 0, batch 0"):
        call(loop, model)
    call(loop, model)
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_nan_before_a_break_in_the_last_epoch_is_raised_at_the_end_of_epochs() -> None:
    """On an accelerator."""
    loop, model, optimizer = make_alone()
    loop._updates._finite = FiniteCheck(torch.device("cuda"), Behind())  # type: ignore[arg-type]
    epochs = loop.epochs(1)
    next(epochs)
    break_after_nan(loop, model, optimizer)
    with pytest.raises(NonFiniteError, match="the loss is nan in epoch 0, batch 0"):
        next(epochs)


def outputs(model: nn.Module, batch: Any) -> tuple[torch.Tensor]:
    """The arguments of a metric without targets."""
    return (model(batch[0]),)


def count_calls(run: Callable[[], object]) -> int:
    """Return the number of calls of ddpilot's own functions while `run` runs."""
    calls: list[str] = []

    def on_event(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("ddpilot."):
            calls.append(frame.f_code.co_name)

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_step_calls_few_functions() -> None:
    """Its time is what calls take, which are counted here because times differ: about 105 in a step at present."""
    loop, model, optimizer, loader = make(num_samples=400)

    def train() -> None:
        for (x,) in loop.batches(loader):
            with loop.accumulate(model):
                loop.backward(nn.functional.cross_entropy(model(x).repeat(1, 2), torch.zeros(len(x)).long()))
            loop.step(optimizer)

    train()
    assert count_calls(train) / len(loader) < 120


def test_track_refuses_models_per_rank_and_a_function_for_nothing() -> None:
    """A model is the same on all ranks."""
    loop = Loop(group=FakeGroup())
    with pytest.raises(LoopError, match="'model', a Linear, with `per_rank=True`: it is the same on all ranks"):
        loop.track(model=nn.Linear(1, 1), per_rank=True)
    with pytest.raises(LoopError, match="`redistribute` without `per_rank=True`"):
        loop.track(generator=torch.optim.lr_scheduler, redistribute=lambda states, rank, world_size: None)


class Lookahead(torch.optim.Optimizer):
    """A wrapper of an optimizer as many are written: it does not call `Optimizer.__init__`, so it has no hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> Any:
        """A step."""
        return self.inner.step(closure)


@pytest.mark.parametrize("world_size", [1, 2])
def test_prepare_takes_a_wrapper_of_an_optimizer_without_hooks(world_size: int) -> None:
    """On several ranks, too, where steps of other optimizers are checked."""
    loop = Loop(group=FakeGroup(world_size=world_size))
    optimizer = Lookahead(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    assert loop.prepare(optimizer) is optimizer


def test_step_refuses_gradients_of_a_plain_backward_after_a_backward_of_another_model() -> None:
    """As of the second model of a GAN: its gradients are not weighted by samples."""
    loop = Loop(group=FakeGroup(), progress=False)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    steps = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
    loop.prepare(first, second, *steps)
    batches = loop.batches(make_loader(loop))
    (x,) = next(batches)
    loop.backward(first(x).square().mean())
    assert loop.step(steps[0])
    second(x).square().mean().backward()
    with pytest.raises(LoopError, match=r"no loop\.backward\(\) computed them in this update \(batch 0 of epoch 0\)"):
        loop.step(steps[1])
    steps[1].zero_grad()
    loop.backward(first(x).square().mean() + second(x).square().mean())
    assert [loop.step(one) for one in steps] == [True, True]


def test_epochs_until_a_number_of_updates_refuse_an_epoch_without_steps() -> None:
    """The loop does not count `optimizer.step()`, so training would never end."""
    loop, model, optimizer = make_alone()
    loader = make_loader(loop)
    epochs = loop.epochs(max_updates=9)
    assert next(epochs) == 0
    train(loop, model, optimizer, loader)
    assert next(epochs) == 1
    for (x,) in loop.batches(loader):
        loop.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(LoopError, match=r"loop\.step\(\) was not called in epoch 1, so that number of updates"):
        next(epochs)
