# SPDX-License-Identifier: Apache-2.0
"""Other batches, losses, models and places than the usual ones."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ddpilot
from ddpilot.errors import LoopError
from ddpilot.trainer.callbacks.best_epoch import BestWeights, EarlyStopping
from ddpilot.trainer.callbacks.monitors import Norms
from tests.dist.trainer.bodies import BATCH_SIZE, launcher, make_data, make_model, make_optimizer, make_trainer
from tests.preload import PRELOAD
from tests.soak import often


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers with targets of which some are left out, as a mapping."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        x = torch.linspace(0, number / 21, 6, dtype=torch.float64)
        return {"x": x, "labels": torch.where(torch.arange(6) < number % 7, x.flip(0), torch.nan)}


class Reader(nn.Module):
    """Called by name; also knows how to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.temperature = 1.0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """x: (samples, 6)."""
        return x * self.weight

    def sample(self, num: int) -> torch.Tensor:
        """Random rows, without gradient and in eval mode."""
        assert not self.training
        assert not torch.is_grad_enabled()
        return torch.rand(num, 6) * self.temperature


def token_loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The mean over the tokens that count, and how many these are."""
    counts = ~batch["labels"].isnan()
    wrong = (output - batch["labels"])[counts]
    return wrong.pow(2).sum() / max(int(counts.sum()), 1), int(counts.sum())


class Warm(ddpilot.Callback):
    """Changes an attribute of the model and draws from it."""

    def __init__(self) -> None:
        self.drawn: list[Any] = []

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        run.model.temperature = 2.0 + run.epoch  # type: ignore[assignment]
        self.drawn.append(run.call_model("sample", 3))


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_mappings_tokens_and_methods(num_ranks: int) -> None:
    """A mapping goes to the model by name, a loss with a count is a mean over tokens, on training and validation data.

    The model's own method runs in a callback; an attribute that changed comes back.
    """
    model, callback = Reader(), Warm()
    trainer = ddpilot.Trainer(
        model, token_loss, lambda p: torch.optim.SGD(p, lr=0.0), callbacks=[callback], launcher=launcher()
    )
    history = trainer.fit(Texts(), Texts(), epochs=1, global_batch_size=4, nproc_per_node=num_ranks)
    batch = {name: torch.stack([Texts()[number][name] for number in range(21)]) for name in ("x", "labels")}
    expected = token_loss(model(batch["x"]), batch)[0].item()
    assert history.epochs[0]["loss"] == pytest.approx(expected, rel=1e-10)
    assert history.epochs[0]["val_loss"] == pytest.approx(expected, rel=1e-10)
    assert [tuple(one.shape) for one in callback.drawn] == [(3, 6)]
    assert model.temperature == 2.0
    assert trainer.call("sample", 2).shape == (2, 6)
    one, two = trainer.call("sample", 2, ranks="all", nproc_per_node=2)
    assert not torch.equal(one, two)
    assert torch.equal(trainer.predict(Texts()), model(batch["x"]).detach())
    with pytest.raises(LoopError, match="Reader has no such method"):
        trainer.call("draw")


class Flow(nn.Module):
    """Trained by a method of its own, and by a part of it; made in torch's default dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(4, 4)
        self.prior = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 4)."""
        return torch.as_tensor(self.inner(x))

    def log_likelihood(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 4); tensors created here have the default dtype."""
        return torch.as_tensor(-(self(x) - torch.full((4,), 1 / 3)).square().sum(1))


def score(model: Any, batch: Any) -> Any:
    """By a method and a part of the model."""
    return model.log_likelihood(batch[0]) - model.prior(batch[0])[:, 0] ** 2, batch[0]


class FlowTrainer(ddpilot.Trainer):
    """Overrides the step, which calls a method of the wrapped model."""

    def train_batch(self, run: ddpilot.Run, batch: Any) -> Any:
        """One likelihood."""
        with run.loop.accumulate(run.wrapped):
            loss = -self.forward(run.wrapped, batch)[0].mean()
            run.loop.backward(loss)
        run.loop.step(run.optimizer)
        return loss


def train_flow(num_ranks: int, cls: type[ddpilot.Trainer] = ddpilot.Trainer) -> dict[str, Any]:
    """Two epochs, with the default dtype of this process; the weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        trainer = cls(
            Flow(),
            lambda likelihood, _: -likelihood.mean(),
            make_optimizer,
            forward=score,
            accumulate=2,
            launcher=launcher(),
        )
        trainer.fit(make_data(), epochs=2, global_batch_size=BATCH_SIZE, nproc_per_node=num_ranks)
    finally:
        torch.set_default_dtype(before)
    return trainer.model.state_dict()


def test_methods_and_parts_of_a_model_train_in_ddp_as_alone() -> None:
    """`forward=` may call anything of the model, and a step of one's own its methods.

    The ranks have the notebook's default dtype.
    """
    torch.testing.assert_close(train_flow(2), train_flow(0), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(train_flow(2, FlowTrainer), train_flow(0), rtol=1e-9, atol=1e-12)


class GanTrainer(ddpilot.Trainer):
    """Two models in turn."""

    def train_batch(self, run: ddpilot.Run, batch: Any) -> Any:
        """The discriminator's step, then the generator's."""
        (real,), loop = batch, run.loop
        generator, discriminator = run.wrapped["generator"], run.wrapped["discriminator"]
        fake = generator(real.flip(1))
        with loop.accumulate(discriminator):
            both = discriminator(torch.cat([real, fake.detach()]))
            d_loss = both[len(real) :].mean() - both[: len(real)].mean() + both.pow(2).mean()
            loop.backward(d_loss)
        loop.step(run.optimizers["discriminator"])
        inner = run.model.get_submodule("discriminator").requires_grad_(False)
        with loop.accumulate(generator):
            g_loss = -inner(fake).mean()
            loop.backward(g_loss)
        inner.requires_grad_(True)
        loop.step(run.optimizers["generator"])
        return {"loss": g_loss, "d_loss": d_loss}


def train_gan(num_ranks: int) -> GanTrainer:
    """Two epochs."""
    torch.manual_seed(0)
    parts = {"generator": nn.Linear(4, 4), "discriminator": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))}
    trainer = GanTrainer(
        nn.ModuleDict(parts).double(),
        None,
        {"generator": lambda p: torch.optim.SGD(p, lr=0.1), "discriminator": lambda p: torch.optim.Adam(p, lr=0.01)},
        launcher=launcher(),
    )
    data = TensorDataset(make_data().tensors[0])
    trainer.fit(data, epochs=2, global_batch_size=BATCH_SIZE, nproc_per_node=num_ranks)
    return trainer


def test_a_step_of_its_own_trains_two_models() -> None:
    """A GAN by `train_batch`: both losses are recorded, and the numbers are those of one process."""
    alone, together = train_gan(0), train_gan(2)
    assert sorted(together.history.updates[0]) == ["d_loss", "loss", "update"]
    for one, other in zip(alone.history.updates, together.history.updates, strict=True):
        assert other == pytest.approx(one, rel=1e-9)
    torch.testing.assert_close(together.model.state_dict(), alone.model.state_dict(), rtol=1e-9, atol=1e-12)
    assert together.history.epochs[-1]["d_loss"] < together.history.epochs[0]["d_loss"]


class Sizes(ddpilot.Callback):
    """On how many ranks each fit was."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_fit_start(self, run: ddpilot.Run) -> None:
        self.seen.append(run.loop.world_size)


def test_data_loaders_plateaus_and_sharded_optimizers() -> None:
    """DataLoaders keep their batch size, ReduceLROnPlateau gets the validation loss, and sharded state is returned."""

    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)

    sizes = Sizes()
    trainer = make_trainer(scheduler=plateau, ema=None, callbacks=[sizes])
    training = DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True)
    validation = DataLoader(make_data(21, first=60), batch_size=5)
    trainer.fit(training, validation, epochs=2, nproc_per_node=2, ddp={"shard": "optimizer"})
    assert [row["lr"] for row in trainer.history.epochs] == pytest.approx([0.05, 0.005])
    assert trainer.optimizers["optimizer"].param_groups[0]["lr"] == pytest.approx(0.0005)
    trainer.fit(training, validation, epochs=1)  # on as many
    assert sizes.seen == [2, 2]
    alone = make_trainer(scheduler=plateau, ema=None)
    alone.fit(training, validation, epochs=3, nproc_per_node=0)
    torch.testing.assert_close(trainer.model.state_dict(), alone.model.state_dict(), rtol=1e-10, atol=1e-13)


def average_of(trainer: ddpilot.Trainer) -> nn.Module:
    """Its average of the weights."""
    assert trainer.ema is not None
    return trainer.ema


def fit_sharded() -> dict[str, Any]:
    """Two fits on ranks that exist, of a model whose layers are sharded."""
    sharding = ddpilot.ParameterSharding(min_parameters=1)
    trainer = make_trainer()
    for _ in range(2):
        trainer.fit(make_data(), make_data(5), epochs=1, global_batch_size=BATCH_SIZE, ddp={"shard": sharding})
    return {
        "values": trainer.evaluate(make_data(5)),
        "weights": ddpilot.full_state(trainer.model),
        "average": ddpilot.full_state(average_of(trainer)),
    }


def test_a_trainer_shards_parameters_from_a_notebook_and_on_ranks(tmp_path: Path) -> None:
    """Whole weights and averages come back; a second fit on ranks and a resumed one go on with shards."""
    alone, trainer = make_trainer(), make_trainer()
    options: dict[str, Any] = {"global_batch_size": BATCH_SIZE}
    trainer.fit(make_data(), make_data(5), epochs=2, nproc_per_node=2, ddp={"shard": "parameters"}, **options)
    zero, one = replace(launcher(), nproc_per_node=2, preload=PRELOAD).run(fit_sharded)
    saved: dict[str, Any] = {"ddp": {"shard": "parameters"}, "checkpoint_dir": tmp_path, **options}
    make_trainer().fit(make_data(), make_data(5), epochs=1, nproc_per_node=2, dry_run=True, **saved)
    assert not list(tmp_path.glob("save-*"))
    make_trainer().fit(make_data(), make_data(5), epochs=1, nproc_per_node=2, **saved)
    assert [path.name for path in tmp_path.glob("save-*/*.distcp")] != []
    resumed = make_trainer()
    resumed.fit(make_data(), make_data(5), epochs=2, nproc_per_node=3, **saved)
    for _ in range(2):
        alone.fit(make_data(), make_data(5), epochs=1, nproc_per_node=0, **options)
    for weights in (trainer.model.state_dict(), zero["weights"], resumed.model.state_dict()):
        torch.testing.assert_close(weights, alone.model.state_dict(), rtol=1e-10, atol=1e-13)
    for average in (average_of(trainer).state_dict(), zero["average"], average_of(resumed).state_dict()):
        torch.testing.assert_close(average, average_of(alone).state_dict(), rtol=1e-10, atol=1e-13)
    expected = pytest.approx(alone.evaluate(make_data(5)), rel=1e-10)
    assert zero["values"] == one["values"] == expected


class Score(ddpilot.Callback):
    """A metric with its best value in epoch 1."""

    ranks = "all"

    def on_evaluate_end(self, run: ddpilot.Run) -> None:
        run.metrics["val_score"] = (1.0, 2.0, 1.0, 0.0)[run.epoch]


class Fail(ddpilot.Callback):
    """An error after epoch 2, whose checkpoint is not written."""

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        if run.epoch == 2:
            raise ArithmeticError("no more")


def fit_best(
    folder: Path, num_ranks: int, ddp: dict[str, Any], *callbacks: ddpilot.Callback, **options: Any
) -> dict[str, Any]:
    """The norms, the best weights of a fit that stops early, and their file."""
    norms, file = Norms(every=1, layers=True), folder / "best.safetensors"
    stopping = EarlyStopping("val_score", mode="max", patience=2, restore_best=True)
    best = BestWeights(file, "val_score", mode="max")
    trainer = make_trainer(callbacks=[Score(), norms, best, stopping, *callbacks])
    options = {"epochs": 4, "global_batch_size": BATCH_SIZE, "nproc_per_node": num_ranks, **options}
    trainer.fit(make_data(), make_data(5), ddp=ddp, **options)
    file_average = make_model()
    ddpilot.load_weights(file_average, file)
    assert (best.best_epoch, stopping.best) == (1, 2.0)
    return {
        "norms": torch.tensor([[row[name] for name in sorted(row)] for row in norms.rows], dtype=torch.float64),
        "weights": trainer.model.state_dict(),
        "average": average_of(trainer).state_dict(),
        "file": file_average.state_dict(),
        "epochs": len(trainer.history.epochs),
    }


@often("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_norms_and_best_weights_of_sharded_parameters_are_those_of_one_process(tmp_path: Path, num_ranks: int) -> None:
    """Also in a fit that resumes after the best epoch: on ranks that have its shards from the checkpoint."""
    ddp = {"shard": ddpilot.ParameterSharding(min_parameters=1)}
    alone = fit_best(tmp_path, 0, {})
    found = [fit_best(tmp_path, num_ranks, ddp)]
    saved = {"checkpoint_dir": tmp_path / "ckpt"}
    with pytest.raises(ddpilot.RankError, match="no more"):
        fit_best(tmp_path, num_ranks, ddp, Fail(), **saved)
    found.append(fit_best(tmp_path, num_ranks % 3 + 1, ddp, **saved))
    for one in found:
        torch.testing.assert_close(one, alone, rtol=1e-10, atol=1e-13)
    assert alone["epochs"] == 4


def fit_on_a_rank() -> dict[str, Any]:
    """What a script under torchrun does; each rank made other weights."""
    loop = ddpilot.Loop()
    torch.manual_seed(loop.rank)
    model = nn.Linear(4, 1).double()
    trainer = ddpilot.Trainer(model, nn.functional.mse_loss, make_optimizer)
    x, y = make_data(21).tensors
    own = nn.functional.mse_loss(model(x), y).item()
    first = trainer.evaluate(make_data(21))["loss"]
    before = signal.getsignal(signal.SIGINT)
    for _ in range(2):
        trainer.fit(make_data(), epochs=1, global_batch_size=BATCH_SIZE, nproc_per_node=7, ddp={"shard": "optimizer"})
    assert signal.getsignal(signal.SIGINT) == before
    return {
        "first": first,
        "own": own,
        "last": trainer.evaluate(make_data(21))["loss"],
        "weights": model.state_dict(),
        "predictions": trainer.predict(make_data(5)),
        "history": [row["loss"] for row in trainer.history.epochs],
        "called": trainer.call("forward", torch.ones(1, 4, dtype=torch.float64)),
    }


def test_a_trainer_on_a_rank_trains_right_there() -> None:
    """The same code in a launched function: no further ranks, weights of rank 0 first, the same on all afterwards."""
    zero, one = replace(launcher(), nproc_per_node=2, preload=PRELOAD).run(fit_on_a_rank)
    assert one["predictions"] is one["called"] is None
    assert zero["predictions"].shape == (5, 1)
    assert zero["called"].shape == (1, 1)
    for name in ("first", "last", "history"):
        assert zero[name] == one[name], name
    assert zero["last"] < zero["first"] == pytest.approx(zero["own"], rel=1e-10)
    assert one["own"] != zero["own"]
    torch.testing.assert_close(zero["weights"], one["weights"], rtol=0, atol=0)


class Faulty(nn.Module):
    """Fails on one rank, in the second update."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 4)."""
        self.num_calls += 1
        if self.num_calls == 2 and torch.distributed.get_rank() == 1:
            raise ArithmeticError("a bad sample")
        return torch.as_tensor(self.inner(x))


def test_an_exception_of_a_rank_is_raised_here_and_leaves_all_as_it_was() -> None:
    """RankError with the user's line, without the trainer's lines before it."""
    trainer = ddpilot.Trainer(Faulty(), nn.functional.mse_loss, make_optimizer, launcher=launcher())
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ddpilot.RankError, match=r"rank 1 raised ArithmeticError: a bad sample") as caught:
        trainer.fit(make_data(), epochs=1, global_batch_size=BATCH_SIZE, nproc_per_node=2)
    assert "running `Trainer.fit` on 2 ranks" in str(caught.value)
    assert 'raise ArithmeticError("a bad sample")' in caught.value.rank_traceback
    assert "trainer/fit" not in caught.value.rank_traceback
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)
    assert trainer.position.num_updates == 0


def test_a_finding_is_reported_once_in_all_fits_of_a_trainer(capfd: pytest.CaptureFixture[str]) -> None:
    """On ranks that it started there is no user line, so none is shown. The error states what a Trainer accepts."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    trainer = ddpilot.Trainer(model, nn.functional.mse_loss, make_optimizer, launcher=launcher())
    for _ in range(2):
        trainer.fit(make_data(48), epochs=1, global_batch_size=BATCH_SIZE, nproc_per_node=2)
    said = capfd.readouterr().err
    assert said.count("small-batch-norm  DDP501") == 1
    assert "ddpilot:0" not in said
    assert 'ddp={"sync_batch_norm": True}' in said
    assert [finding.code for finding in trainer.findings] == ["DDP501"]


def test_explain_returns_the_choices_of_the_ranks() -> None:
    """DDP's options with their reasons and measurements, after a fit on two ranks."""
    trainer = make_trainer()
    trainer.fit(make_data(), epochs=4, global_batch_size=BATCH_SIZE, nproc_per_node=2, ddp={"bucket_cap_mb": 5})
    said = str(trainer.explain())
    assert "DistributedDataParallel over 2 ranks" in said
    assert "bucket_cap_mb = 5" in said
    assert "times: up to update" in said


class Two(nn.Module):
    """Two parts, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = make_model()[:2], make_model()[2:]  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 4)."""
        return torch.as_tensor(self.head(self.body(x)))


def through_both(model: Any, batch: Any) -> Any:
    """The same of a ModuleDict."""
    return model["head"](model["body"](batch[0])), batch[1]


@often("0", "3")
@pytest.mark.parametrize("num_ranks", [0, 2, 3])
def test_several_optimizers_train_their_parts_together(num_ranks: int) -> None:
    """With the usual step: one backward, then every optimizer and its scheduler, as in a plain loop."""
    expected, x, y = Two(), *make_data(9).tensors
    plain = [make_optimizer(expected.body.parameters()), torch.optim.SGD(expected.head.parameters(), lr=0.1)]
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain[1], 0.5)
    for rows in (slice(0, 8), slice(8, 9)) * 2:
        torch.autograd.backward(nn.functional.mse_loss(expected(x[rows]), y[rows]))
        for each in plain:
            each.step()
            each.zero_grad()
        schedule.step()
    together, parts = Two(), nn.ModuleDict(dict(Two().named_children()))
    for model, forward in ((together, None), (parts, through_both)):
        trainer = ddpilot.Trainer(
            model,
            nn.functional.mse_loss,
            {"body": make_optimizer, "head": lambda p: torch.optim.SGD(p, lr=0.1)},
            scheduler={"head": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)},
            forward=forward,
            launcher=launcher(),
        )
        history = trainer.fit(
            make_data(9), make_data(9), epochs=2, global_batch_size=8, shuffle=False, nproc_per_node=num_ranks
        )
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-10, atol=1e-13)
        assert history.epochs[-1]["update"] == 4
        predicted = trainer.predict(
            make_data(9), forward=None if forward is None else lambda m, b: through_both(m, b)[0]
        )
        torch.testing.assert_close(predicted, expected(x).detach(), rtol=1e-10, atol=1e-13)
