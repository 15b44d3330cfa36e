# SPDX-License-Identifier: Apache-2.0
"""What one update does on real ranks: synchronised once, skipped together, refused together, and no rank left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddpilot import FakeGroup, RankError
from ddpilot.errors import LoopError, NonFiniteError
from ddpilot.group.protocol import GroupLike
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap
from tests.dist.training.bodies import launch, launch_unwatched
from tests.soak import IS_SOAK

X = torch.arange(26, dtype=torch.float64).reshape(13, 2) / 10
"""With a global batch of 12, the second and last batch has one sample: for rank 0."""


def flat(model: nn.Module) -> list[float]:
    """All weights in a row."""
    return torch.cat([weight.detach().reshape(-1) for weight in model.parameters()]).tolist()


def accumulate_once() -> list[list[float]]:
    """The gradient on every rank after each batch of one accumulation group."""
    loop = Loop(accumulate=2)
    model = loop.prepare(nn.Linear(2, 1).double())
    loader = loop.loader(TensorDataset(X), global_batch_size=12)
    seen = []
    for (x,) in loop.batches(loader):
        with loop.accumulate(model):
            loop.backward(model(x).pow(2).sum() / max(len(x), 1))
        seen.append(model.module.weight.grad.tolist()[0])
        assert loop.is_update == (len(seen) == 2)
    inner = model.module
    inner.zero_grad()
    inner(X).pow(2).mean().backward()
    return [*seen, inner.weight.grad.tolist()[0]]


def test_accumulate_synchronises_with_the_last_batch_only() -> None:
    """Gradients differ between ranks before, and are those of the mean of all 13 samples after, on both ranks."""
    zero, one = launch(2, accumulate_once)
    assert zero[0] != one[0]
    for first, last, expected in (zero, one):
        assert last == zero[1] == pytest.approx(expected, rel=1e-12)
        assert first != last


def train_gan(num_epochs: int = 3) -> list[float]:
    """A generator and a discriminator with an optimizer each; their weights at the end."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=1)
    generator, discriminator = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)]
    generator, discriminator, *optimizers = loop.prepare(generator, discriminator, *optimizers)
    loss_fn = nn.BCEWithLogitsLoss()
    loader = loop.loader(TensorDataset(X), global_batch_size=12, shuffle=True)
    for _ in loop.epochs(num_epochs):
        for (real,) in loop.batches(loader):
            fake = generator(real.flip(1))
            with loop.accumulate(discriminator):
                scores = discriminator(torch.cat([real, fake.detach()]))
                truth = torch.cat([torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])])
                loop.backward(loss_fn(scores, truth))
            loop.step(optimizers[1])
            discriminator.requires_grad_(False)
            with loop.accumulate(generator):
                scores = unwrap(discriminator)(fake)
                loop.backward(loss_fn(scores, torch.ones_like(scores)))
            discriminator.requires_grad_(True)
            loop.step(optimizers[0])
    return flat(generator) + flat(discriminator)


def test_two_models_with_two_optimizers_train_alike_at_any_world_size() -> None:
    """A GAN, whose batches have two backward passes and two steps."""
    (alone,), *others = (launch(num, train_gan) for num in ((1, 2, 4) if IS_SOAK else (1, 4)))
    for results in others:
        for weights in results:
            assert weights == pytest.approx(alone, rel=1e-10)


ORDERS = {
    "discriminator first": "zero d, d, step d, zero g, g, step g",
    "generator first": "zero g, g, step g, zero d, d, step d",
    "two generator steps": "zero g, g, step g, zero g, g, step g, zero d, d, step d",
    "two passes before a step": "zero d, d, penalty of d, step d, zero g, g, step g",
    "one pass before two steps": "g, step g, step d",
}
"""What a GAN does with each batch, in order. The discriminator is never frozen."""


def gan_loss(what: str, real: torch.Tensor, models: dict[str, nn.Module]) -> torch.Tensor:
    """The mean loss of the generator or the discriminator, or one with a gradient penalty."""
    if what == "penalty of d":
        x = real.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(models["d"](x).sum(), x, create_graph=True)
        return torch.as_tensor(gradient.pow(2).sum(1).mean() + models["d"](real).square().mean())
    fake = models["g"](real.flip(1))
    if what == "g":
        return nn.functional.softplus(-models["d"](fake)).mean()
    scores = models["d"](torch.cat([real, fake.detach()]))
    return (nn.functional.softplus(-scores[: len(real)]) + nn.functional.softplus(scores[len(real) :])).mean()


def train_unfrozen(order: str, *, is_plain: bool = False) -> list[float]:
    """The weights of both models after two epochs, with `Loop` or in plain PyTorch."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=0, progress=False, group=FakeGroup() if is_plain else None)
    torch.manual_seed(0)
    models: dict[str, Any] = {"g": nn.Linear(2, 2), "d": nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.05) for name, model in models.items()}
    if not is_plain:
        models["g"], models["d"], *_ = loop.prepare(*models.values(), *optimizers.values())
    loader = loop.loader(TensorDataset(X), global_batch_size=5)
    for _ in range(2):
        for (real,) in DataLoader(TensorDataset(X), batch_size=5) if is_plain else loop.batches(loader):
            for what in order.split(", "):
                optimizer = optimizers[what[-1]]
                if what.startswith("zero"):
                    optimizer.zero_grad()
                elif what.startswith("step"):
                    _ = optimizer.step() if is_plain else loop.step(optimizer)
                else:
                    loss = gan_loss(what, real, models)
                    backward: Any = torch.autograd.backward if is_plain else loop.backward
                    backward(loss)
            if is_plain and "zero" not in order:
                for optimizer in optimizers.values():
                    optimizer.zero_grad()
    return flat(models["g"]) + flat(models["d"])


def train_unfrozen_in_each_order() -> Any:
    """The weights by order, with `Loop` and in plain PyTorch; and what is said without the lines with `zero_grad`."""
    found = {name: (train_unfrozen(order), train_unfrozen(order, is_plain=True)) for name, order in ORDERS.items()}
    with pytest.raises(LoopError) as refused:
        train_unfrozen("d, step d, g, step g")
    return found, str(refused.value)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_unfrozen_discriminator_has_the_numbers_of_plain_pytorch_or_is_refused(num_ranks: int) -> None:
    """The generator step leaves gradients in it, which must not get into its own next update."""
    for found, refused in launch(num_ranks, train_unfrozen_in_each_order):
        for name, (weights, expected) in found.items():
            assert weights == pytest.approx(expected, rel=1e-10), name
        assert "Write optimizer.zero_grad() for this optimizer" in refused


class Rated(nn.Module):
    """Trained by a method that is not `forward`, and made of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.head = nn.Linear(2, 1)
        self.scale = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 2)."""
        return torch.as_tensor(self.inner(x).tanh())

    def rate(self, x: torch.Tensor, *, power: float) -> torch.Tensor:
        """x: (samples, 2)."""
        return torch.as_tensor(self.head(self(x)).abs() ** power)


def train_rated(how: str, group: GroupLike | None = None) -> Any:
    """An epoch of a model by its method, or in a way that goes round DDP; its weights, or what was refused."""
    loop = Loop(seed=1, accumulate=2, group=group)
    inner = Rated().double()
    model, optimizer = loop.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    plain: Any = unwrap(model)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "method": lambda x: model.rate(x, power=2.0),
        "inner": lambda x: inner.rate(x, power=2.0),
        "unwrapped": lambda x: plain.rate(x, power=2.0),
        "parts": lambda x: model.head(model.inner(x).tanh()) ** 2,
    }
    try:
        for (x,) in loop.batches(loop.loader(TensorDataset(X), global_batch_size=5)):
            with loop.accumulate(model) if how != "inner" else nullcontext():
                loop.backward(ways[how](x).mean() * model.scale)
            loop.step(optimizer)
    except LoopError as error:
        return str(error)
    return flat(model)


def train_rated_each_way() -> Any:
    """By the method, alone and together; then round DDP."""
    ways = ("method", "inner", "unwrapped", "parts")
    return train_rated("method", FakeGroup()), [train_rated(how) for how in ways]


def test_a_method_of_a_prepared_model_trains_as_forward_does_and_what_goes_round_ddp_is_refused() -> None:
    """The same numbers as alone; gradients that did not cross are refused before the weights of ranks differ."""
    for rank, (alone, (together, *refused)) in enumerate(launch(2, train_rated_each_way)):
        assert together == pytest.approx(alone, rel=1e-10)
        for text in refused:
            assert text.startswith(f"[rank {rank}] updating the weights in batch 1 of epoch 0: Rated has gradients")
            assert "Call the model that prepare() returned, or one of its methods" in text


def overflow_on_rank_one() -> list[tuple[bool, list[float], float]]:
    """Three fp16 updates, of which the second has an infinite gradient on rank 1."""
    loop = Loop(precision="fp16")
    model, optimizer = loop.prepare(*(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.01)))(nn.Linear(2, 1)))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader = loop.loader(TensorDataset(X.float()), global_batch_size=4)
    seen = []
    for number, (x,) in enumerate(loop.batches(loader)):
        with loop.accumulate(model):
            loss = model(x).float().pow(2).mean() / 1000
            loop.backward(loss * (3e38 if number == 1 and loop.rank == 1 else 1.0))
        norm = loop.clip_grad_norm_(model.parameters(), 1e6)
        assert norm is not None
        seen.append((loop.step(optimizer, schedule), flat(model), float(schedule.get_last_lr()[0])))
    assert loop.num_updates == 3
    return seen


def test_fp16_skips_an_update_on_all_ranks_when_one_overflows() -> None:
    """The others step with it; the weights stay the same on all ranks, and the schedule waits."""
    for seen in (results := launch(2, overflow_on_rank_one)):
        assert [done for done, _, _ in seen] == [True, False, True, True]
        assert seen[0][1] == seen[1][1] != seen[2][1]
        assert [lr for _, _, lr in seen] == [0.005, 0.005, 0.0025, 0.00125]
        assert seen == results[0]


class Rooted(nn.Module):
    """Its gradient is infinite though its output is finite, on every rank or in one batch of rank 1; or it has none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1).double()
        self.offset = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.how = how

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        """x: (samples, 2)."""
        out = self.layer(x) + 0 * self.offset
        if self.how == "aside" and is_bad:  # NaN does not go back to the input's side
            return torch.as_tensor(out + (0 * self.offset).sqrt())
        if self.how == "hidden":  # a dead unit: NaN does not go back through it
            return torch.as_tensor((-1 - out.abs()).relu() + (float("nan") if is_bad else 1.0))
        if self.how == "gradient" and is_bad:
            return torch.as_tensor((out - out.detach()).abs().sqrt())
        return torch.as_tensor(out * (float("nan") if is_bad else 1.0))


def nan_on_rank_one(how: str, clips: bool) -> Any:
    """The error that each rank gets, the number of updates before it, and whether the weights are still good."""
    loop = Loop(accumulate=2)
    model = Rooted(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = loop.prepare(model, optimizer)
    loader = loop.loader(TensorDataset(X.repeat(20, 1)), global_batch_size=2)
    try:
        for number, (x,) in enumerate(loop.batches(loader)):
            with loop.accumulate(model):
                loop.backward(model(x, number == 2 and loop.rank == 1).mean())
            if clips:
                loop.clip_grad_norm_(model.parameters(), 1.0)
            loop.step(optimizer)
    except NonFiniteError as error:
        return error, loop.num_updates, all(value == value for value in flat(model))
    return None


def each_nan() -> list[Any]:
    """All kinds, one after the other in one group."""
    return [nan_on_rank_one(how, clips) for how in ("loss", "gradient", "aside", "hidden") for clips in (True, False)]


def test_what_is_not_finite_on_one_rank_stops_all_of_them_before_the_update() -> None:
    """Also in a batch that only accumulates, clipped or not; the rank, the batch, and its samples are named.

    Of a gradient they are where it went back to the first layer, and otherwise what each rank had. A loss
    that reaches no gradient spoils no weight: it is told with the next exchange of flags.
    """
    for *losses, hidden, hidden_too in launch(2, each_nan):
        for error, num_updates, is_good in losses:
            assert (num_updates, is_good) == (1, True)
            assert "weights that are not finite: none; gradients: " in error.found
        for error, *_ in losses[:2]:
            assert error.rank == 1
            assert error.found.startswith("on rank 1 the loss is nan in epoch 0, batch 2, of samples 5;")
        for error, *_ in losses[2:4]:
            assert error.rank == 1
            assert error.found.startswith("on rank 1, in epoch 0, batch 2, of samples 5, they are not finite, though")
            assert error.found.endswith("gradients: offset, layer.weight, layer.bias")
        for error, *_ in losses[4:]:
            assert error.found.endswith("gradients: offset")
            assert error.found.startswith("their sum over ranks is not finite, though every rank's loss")
            ends = "in the update of 2 batches that ends with epoch 0, batch 3,"
            assert f"; rank 0 {ends} of samples 6; rank 1 {ends} of samples 7; weights" in error.found
        for error, num_updates, is_good in (hidden, hidden_too):
            assert (error.rank, is_good) == (1, True)
            assert 1 <= num_updates <= 33
            assert "on rank 1 the loss is nan in epoch 0, batch 2, of samples 5;" in error.found


class Reshaping(nn.Module):
    """Fails on zero rows, as people's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 2)."""
        return self.layer(x.view(len(x), -1))  # type: ignore[no-any-return]


def train_reshaping() -> None:
    """Two epochs, whose last batch has no sample for rank 1; in the second the loop itself reshapes."""
    loop = Loop()
    model = loop.prepare(Reshaping())
    for epoch in range(2):
        for (x,) in loop.batches(loop.loader(TensorDataset(X), global_batch_size=12)):
            with loop.accumulate(model):
                loop.backward(model(x.view(len(x), -1) if epoch else x).mean())


def test_a_loop_that_cannot_take_zero_rows_is_told_what_to_do_and_a_model_can() -> None:
    """The error names the batch, and the usual cause. What fails in the model is not in the way."""
    with pytest.raises(RankError, match=r"it has 1 samples for 2 ranks, none of them on this rank") as caught:
        launch(2, train_reshaping)
    assert isinstance(caught.value.__cause__, LoopError)
    assert caught.value.rank == 1
    assert "x.flatten(1)" in str(caught.value)
    assert "epoch 1" in str(caught.value)


def train_batch_norm(global_batch_size: int, num_samples: int) -> Any:
    """Findings, warnings, and buffers before and after an evaluation."""
    loop = Loop()
    model = loop.prepare(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    generator = torch.Generator().manual_seed(2)
    loader = loop.loader(
        TensorDataset(torch.randn(num_samples, 2, generator=generator)), global_batch_size=global_batch_size
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for (x,) in loop.batches(loader):
                loop.backward(model(x).pow(2).mean())
    if loop.rank == 0:
        model(x)  # a forward of one rank alone meets no collective
    model.eval()
    before = unwrap(model).get_buffer("1.running_mean").tolist()
    loop.evaluate(model, loader, {"mean": lambda y: y}, forward=lambda m, batch: (m(batch[0]),))
    after = unwrap(model).get_buffer("1.running_mean").tolist()
    return loop.findings, [str(one.message) for one in caught], before, after


def test_batch_norm_with_few_samples_is_found_once_and_buffers_become_rank_zeros() -> None:
    """One finding, said on rank 0; no buffer crosses in a forward, and evaluation makes them equal."""
    zero, one = launch(2, train_batch_norm, 24, 48)
    assert [finding.code for finding in zero[0]] == ["DDP501"]
    assert zero[0][0].ranks == (0, 1)
    assert zero[0] == one[0]
    assert len(zero[1]) == 1
    assert "is divided into 12, 12" in zero[1][0]
    assert one[1] == []
    assert zero[2] != one[2]
    assert zero[3] == one[3] == zero[2]


def test_batch_norm_with_one_sample_on_a_rank_is_refused_before_the_epoch() -> None:
    """Rather than failing in its last batch."""
    with pytest.raises(RankError, match=r"batch 2 has 3 samples for 2 ranks \(2, 1\), and BatchNorm \(1\) needs two"):
        launch(2, train_batch_norm, 40, 83)


def leave_in_the_middle() -> Any:
    """Break out of an accumulation group; the gradients that are left, and what was said."""
    loop = Loop(accumulate=3)
    model = loop.prepare(nn.Linear(2, 1).double())
    loader = loop.loader(TensorDataset(X), global_batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in loop.epochs(1):
            for (x,) in loop.batches(loader):
                with loop.accumulate(model):
                    loop.backward(model(x).mean())
                break
    return [p.grad for p in model.parameters()], [str(one.message) for one in caught]


def test_leaving_in_the_middle_of_a_group_drops_its_gradients_and_says_so() -> None:
    """They were never synchronised, and would make the ranks' weights differ."""
    zero, one = launch(2, leave_in_the_middle)
    assert zero[0] == one[0] == [None, None]
    assert "left within an accumulation group" in zero[1][0]
    assert one[1] == []


def reduce_and_gather() -> Any:
    """Numbers and rows of all ranks."""
    loop = Loop()
    mine = torch.full((loop.rank, 2), float(loop.rank))
    with loop.rank_zero_first():
        loop.print("said once")
    weighted = loop.reduce(float("nan") if loop.rank == 0 else float(loop.rank), count=loop.rank)
    return [
        weighted.item(),
        loop.reduce(loop.rank, "sum").item(),
        loop.reduce(loop.rank, "max").item(),
        loop.reduce(torch.tensor([loop.rank, 5]), "min").tolist(),
        loop.gather({"rows": mine, "names": [f"rank {loop.rank}"]}),
    ]


def test_reduce_and_gather_combine_unequal_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    """A mean weighted by counts, without the NaN of a rank that has none; rows in the order of ranks."""
    for mean, total, largest, least, gathered in launch(3, reduce_and_gather):
        assert mean == pytest.approx((1 + 4) / 3)
        assert (total, largest, least) == (3.0, 2.0, [0, 5])
        assert gathered["rows"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert gathered["names"] == ["rank 0", "rank 1", "rank 2"]
    assert capfd.readouterr().out.count("said once") == 1


def rank_zero_fails_first() -> None:
    """Rank 0 raises while the others wait."""
    with Loop().rank_zero_first():
        raise ValueError("no such file")


def test_rank_zero_first_raises_on_all_ranks_what_rank_0_raised() -> None:
    """The others do not wait for ever."""
    with pytest.raises(RankError, match="no such file") as caught:
        launch(2, rank_zero_fails_first)
    assert caught.value.rank == 0


def step_plainly(is_prepared: bool, uses_ddp: bool) -> str:
    """Train as without a loop, in `batches`; return the error."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=0, progress=False)
    inner = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    model = loop.prepare(inner)
    if is_prepared:
        optimizer = loop.prepare(optimizer)
    try:
        for (x,) in loop.batches(loop.loader(TensorDataset(X), global_batch_size=5)):
            (model if uses_ddp else inner)(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except LoopError as error:
        return str(error)
    return ""


def step_plainly_with_a_closure() -> str:
    """The same by an optimizer that calls a closure."""
    loop = Loop(seed=0, progress=False)
    inner = nn.Linear(2, 1).double()
    model, optimizer = loop.prepare(inner, torch.optim.LBFGS(inner.parameters(), max_iter=2))
    try:
        for (x,) in loop.batches(loop.loader(TensorDataset(X), global_batch_size=5)):

            def closure(x: torch.Tensor = x) -> Any:
                optimizer.zero_grad()
                loss: Any = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    except LoopError as error:
        return str(error)
    return ""


def step_one_of_two_plainly(**options: Any) -> str:
    """The second model of a batch is trained as without a loop; return the error."""
    loop = Loop(seed=0, progress=False)
    inner = [nn.Linear(2, 1).double() for _ in range(2)]
    steps = [torch.optim.SGD(one.parameters(), lr=0.1) for one in inner]
    first, second, *steps = loop.prepare(*inner, *steps, **options)
    try:
        for (x,) in loop.batches(loop.loader(TensorDataset(X), global_batch_size=5)):
            loop.backward(first(x).square().mean())
            loop.step(steps[0])
            second(x).square().mean().backward()
            steps[1].step()
            steps[1].zero_grad()
    except LoopError as error:
        return str(error)
    return ""


def step_plainly_in_each_way() -> tuple[list[str], list[str]]:
    """The errors of what is refused, and of what is not."""
    refused = [step_plainly(True, True), step_one_of_two_plainly(), step_one_of_two_plainly(shard="parameters")]
    return [*refused, step_plainly_with_a_closure()], [step_plainly(False, True), step_plainly(True, False)]


def test_plain_backward_and_step_are_refused_if_the_gradients_were_averaged() -> None:
    """Ranks with unequal parts of a batch would count the same. Other optimizers and other gradients may step."""
    for rank, (refused, others) in enumerate(launch_unwatched(2, step_plainly_in_each_way)):
        for found in refused:
            assert found.startswith(f"[rank {rank}] updating the weights: gradients of ")
            assert "are from loss.backward(), not loop.backward() (batch 0 of epoch 0)" in found
        assert "Write loop.backward(loss) and loop.step(optimizer) instead" in refused[0]
        assert "Write loop.backward(loss) and loop.step(optimizer, closure=closure) instead" in refused[-1]
        assert others == ["", ""]
