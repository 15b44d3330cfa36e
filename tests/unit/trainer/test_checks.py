# SPDX-License-Identifier: Apache-2.0
"""What a trainer is asked for that would give wrong numbers, or fail late, is refused before a rank starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

import ddpilot
from ddpilot.callbacks import BestWeights, EarlyStopping
from ddpilot.errors import LoopError
from ddpilot.trainer.ranks import report_ignored_ranks

DATA = TensorDataset(torch.arange(14.0).reshape(7, 2), torch.arange(7.0).reshape(7, 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """A small step."""
    return torch.optim.SGD(parameters, lr=0.01)


def make(**options: Any) -> ddpilot.Trainer:
    """A trainer of one layer."""
    given: dict[str, Any] = {"model": nn.Linear(2, 1), "loss_fn": nn.functional.mse_loss, "optimizer": sgd}
    return ddpilot.Trainer(**{**given, **options})


def frozen() -> nn.Module:
    """Nothing to train."""
    return nn.Linear(2, 1).requires_grad_(False)


class Late(ddpilot.Callback):
    """Has a method that is never called."""

    def on_epoch_finish(self, run: ddpilot.Run) -> None:
        raise AssertionError(run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0.0}, r"`clip_norm` is 0\.0\. Give a limit above 0"),
        ({"clip_norm_type": 0}, "`clip_norm_type` is 0. Give a number above 0, such as 1, 2 or inf"),
        ({"clip_norm": 1.0, "clip_value": 0.5}, "`clip_norm` 1.0 and `clip_value` 0.5 for the same gradients"),
        ({"clip_per": "layer"}, "`clip_per` is 'layer'. Use 'model' or 'group'"),
        (
            {"optimizer": lambda parameters: torch.optim.SGD([{"params": list(parameters), "clip_norm": 1.0}], lr=0.1)},
            "group 0 has 'clip_norm', which clipping per model does not use. Pass `clip_per=\"group\"`",
        ),
        ({"clip_norm": -1}, "`clip_norm` is -1"),
        ({"metrics": {"loss": nn.functional.l1_loss}}, "a metric called 'loss'.* a different name"),
        ({"scheduler_per": "epochs"}, r"""`scheduler_per` is 'epochs'\. Did you mean "1 epoch"\?"""),
        ({"precision": "bf32"}, "`precision` is 'bf32'. Use 'fp32' or 'tf32' or 'bf16' or 'bf16-true' or 'fp16'"),
        ({"accumulate": 0}, "`accumulate` is 0"),
        ({"loss_fn": "mse"}, r"`loss_fn` is 'mse'\. Give a function"),
        ({"model": nn.LazyLinear(1)}, r"without a shape yet: weight, bias\. Call the model with one batch"),
        ({"metrics": ["acc"]}, r"`metrics` is \['acc'\]\. Give a dict"),
        ({"epochs": 3}, r"`epochs=3`\. It belongs to `fit`"),
        ({"seeed": 3}, r"`seeed=3`\. Did you mean `seed`\?"),
        ({"callbacks": [Late()]}, r"Late\.on_epoch_finish, which is never called\. Did you mean `on_epoch_end`\?"),
    ],
)
def test_trainer_rejects_invalid_arguments(options: dict[str, Any], message: str) -> None:
    """The error states the value and the fix."""
    with pytest.raises(LoopError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"epochs": 1.5}, r"`epochs` is 1\.5\. Give a whole number"),
        ({}, {"epochs": -1}, "`epochs` is -1"),
        ({}, {"until_epoch": -2}, "`until_epoch` is -2"),
        ({}, {"train_set": None}, "`train_set` is None"),
        ({}, {"train_set": [], "global_batch_size": 1}, "`train_set` is empty: a list of 0 samples"),
        ({}, {"train_set": DataLoader(TensorDataset(torch.ones(0, 1)), 1)}, "`train_set` is empty: a TensorDataset"),
        ({}, {"val_set": TensorDataset(torch.ones(0, 1))}, "`val_set` is empty: a TensorDataset of 0 samples"),
        ({}, {"val_set": [DATA, DATA]}, r"`val_set` is a list of 2: .* a fit takes one dataset\. .* several by name"),
        ({}, {"val_set": {}}, "`val_set` is an empty dict"),
        ({}, {"val_set": {"a b": DATA}}, "a validation set with the name 'a b'. Use letters"),
        ({}, {"val_set": {"a": None}}, "`val_set` 'a' is None"),
        ({}, {"val_set": {"a": DATA, "b": []}}, "`val_set` 'b' is empty: a list of 0 samples"),
        ({}, {"val_set": {"a": {"b": DATA}}}, "`val_set` 'a' is a dict of 'b', and a fit takes one dataset"),
        ({}, {"val_set": {"a": DataLoader(DATA, 4, drop_last=True)}}, "`val_set` 'a' is a DataLoader with drop_last"),
        (
            {"metrics": {"b_loss": nn.functional.l1_loss}},
            {"val_set": {"a": DATA, "a_b": DATA}},
            "metrics 'b_loss' of 'a' and 'loss' of 'a_b', which would both be 'val_a_b_loss'",
        ),
        (
            {"callbacks": [EarlyStopping("clean_loss")]},
            {"val_set": {"clean": DATA}},
            "EarlyStopping monitors 'clean_loss', which no epoch will have. Did you mean 'val_clean_loss'",
        ),
        ({}, {"train_set": {"train": DATA}}, "`train_set` is a dict of 'train', and a fit takes one dataset. Give one"),
        (
            {},
            {"batch_size": 20},
            r"`batch_size=20`\. Give `global_batch_size`, the samples of all ranks together, or",
        ),
        ({}, {"epoch": 2}, r"`epoch=2`\. Did you mean `epochs`\?"),
        ({"model": nn.ModuleDict({"g": nn.Linear(2, 1)})}, {}, "a ModuleDict of 'g', which has no `forward` of its"),
        ({}, {"checkpoints": {"kep": 3}, "checkpoint_dir": "x"}, "`checkpoints` has no 'kep'. Did you mean 'keep'"),
        ({}, {"checkpoints": {"best": "min loss"}}, "'best', and no `checkpoint_dir`: nothing would be saved"),
        ({}, {"loader": {"weigths": [1.0]}}, "`loader` has no 'weigths'. Did you mean 'weights'"),
        ({}, {"loader": {"seed": 1}}, "`loader` has no 'seed'"),
        (
            {"metrics": {"accuracy": nn.functional.l1_loss}},
            {"checkpoints": {"best": "max val_acuracy"}, "checkpoint_dir": "x", "val_set": DATA},
            "`checkpoints` with best monitors 'val_acuracy', which no epoch will have. Did you mean 'val_accuracy'",
        ),
        ({"callbacks": [EarlyStopping()]}, {}, "EarlyStopping monitors 'val_loss'.* There is no `val_set`"),
        ({"callbacks": [BestWeights(monitor="los")]}, {}, "BestWeights monitors 'los'.* Did you mean 'loss'"),
        ({}, {"val_set": DataLoader(DATA, 4, drop_last=True)}, "drop_last=True: 4 of 7 samples would count"),
        ({"model": frozen()}, {}, "all parameters of the model are frozen"),
        ({}, {"global_batch_size": None}, "no batch size, and a TensorDataset. Give `global_batch_size`"),
        ({}, {"batch_size_per_rank": 3}, "'global_batch_size' and 'batch_size_per_rank', and a TensorDataset"),
        ({}, {"ddp": {"com": "bf16"}}, "`ddp` has no 'com'. Did you mean 'comm'"),
        ({"loss_fn": None}, {}, "no `loss_fn`. Give one, or override `train_batch`"),
        (
            {"optimizer": torch.optim.LBFGS, "accumulate": 2},
            {},
            r"a closure \(LBFGS\): `accumulate` is 2, and a closure computes the loss of one batch",
        ),
        (
            {"optimizer": torch.optim.LBFGS, "precision": "fp16"},
            {},
            "`precision` is 'fp16', whose gradients are scaled",
        ),
        ({"closure": True}, {"ddp": {"shard": "optimizer"}}, "each rank would step independently"),
    ],
)
def test_fit_refuses_what_no_rank_could_do(options: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    """Before a rank starts, so that it costs no seconds; names that are near are named."""
    given: dict[str, Any] = {"train_set": DATA, "global_batch_size": 4, "nproc_per_node": 2, **arguments}
    with pytest.raises(LoopError, match=message):
        make(**options).fit(**given)


def test_what_is_missing_is_named() -> None:
    """By the names that the signature has, not by the class that holds them."""
    with pytest.raises(LoopError, match=r"`loss_fn` and `optimizer` are missing\. Give \(model, loss_fn, optimizer"):
        ddpilot.Trainer(nn.Linear(2, 1))  # type: ignore[call-arg]
    with pytest.raises(LoopError, match="starting a fit: `train_set` is missing"):
        make().fit(global_batch_size=4)  # type: ignore[call-arg]
    container = make(model=nn.ModuleDict({"g": nn.Linear(2, 1)}))
    with pytest.raises(LoopError, match="evaluating: the model is a ModuleDict of 'g'"):
        container.evaluate(DATA)


class Own(ddpilot.Callback):
    """Writes its own metric, which other callbacks may monitor."""

    def on_evaluate_end(self, run: ddpilot.Run) -> None:
        run.metrics["val_score"] = 1.0


def test_fit_accepts_monitors_of_metrics_that_a_user_callback_writes() -> None:
    """What that will be is not known before."""
    stopping = EarlyStopping("val_score")
    trainer = make(callbacks=[Own(), stopping])
    trainer.fit(DATA, DATA, global_batch_size=4, nproc_per_node=0, progress=False)
    assert stopping.best == 1.0


def test_fit_refuses_a_loss_without_a_gradient() -> None:
    """Nothing would be trained by it."""
    trainer = make(loss_fn=lambda output, y: nn.functional.mse_loss(output.detach(), y))
    with pytest.raises(LoopError, match=r"`loss_fn` returned a tensor without a gradient.*without `\.detach"):
        trainer.fit(DATA, global_batch_size=4, nproc_per_node=0)


def test_fit_until_an_epoch_does_not_train_on_when_it_is_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "Run all cells" again trains no further; `epochs` does, and reports it."""
    for _ in range(2):
        trainer = make()
        for total in (1, 3):
            trainer.fit(DATA, until_epoch=total, global_batch_size=4, nproc_per_node=0, checkpoint_dir=tmp_path)
        assert trainer.position.epoch == 3
    assert "resuming at epoch 3; until_epoch=1: 0 more, up to 1" in capsys.readouterr().out
    make().fit(DATA, epochs=5, global_batch_size=4, nproc_per_node=0, checkpoint_dir=tmp_path)
    assert "resuming at epoch 3; epochs=5: 2 more, up to 5" in capsys.readouterr().out


class Named(nn.Module):
    """Returns its own loss, as libraries' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: (samples, 2)."""
        output = self.inner(x)
        return {"loss": nn.functional.mse_loss(output, y), "logits": output}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The data as mappings."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        x, y = DATA[number]
        return {"x": x, "y": y}


def test_predict_keeps_the_output_of_its_forward() -> None:
    """For a model that also returns its loss, which does not have one row per sample."""
    model = Named()
    trainer = make(model=model, loss_fn=lambda output, batch: output["loss"])
    trainer.fit(Rows(), global_batch_size=4, nproc_per_node=0, progress=False)
    with pytest.raises(LoopError, match="pass `forward=`"):
        trainer.predict(Rows())
    found = trainer.predict(Rows(), forward=lambda model, batch: model(**batch)["logits"])
    torch.testing.assert_close(found, model.inner(DATA.tensors[0]).detach())
    said = trainer.evaluate(
        Rows(),
        metrics={"distance": lambda output, y: (output - y).abs()},
        forward=lambda model, batch: (model(**batch)["logits"], batch["y"]),
    )
    assert said["distance"] == pytest.approx((found - DATA.tensors[1]).abs().mean().item())


def test_verbs_refuse_options_that_they_have_not(tmp_path: Path) -> None:
    """`batch_size` is ambiguous with several ranks; an existing folder is rejected."""
    trainer = make()
    with pytest.raises(LoopError, match="`predict` has no 'batch_size'. Did you mean 'global_batch_size'"):
        trainer.predict(DATA, batch_size=3)
    with pytest.raises(LoopError, match="4 of 7 samples would count"):
        trainer.evaluate(DataLoader(DATA, 4, drop_last=True))
    with pytest.raises(LoopError, match="`ranks` is 'al'. Use 'zero' or 'all'"):
        trainer.call("forward", ranks="al")  # type: ignore[arg-type]
    with pytest.raises(LoopError, match=rf"predicting into {tmp_path}: {tmp_path} exists already\. Remove it"):
        trainer.predict(DATA, to=tmp_path)


class Full(ddpilot.Callback):
    """Its disk is full."""

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        with open("/dev/full", "w") as file:
            file.write(str(run.epoch))


def test_an_error_of_the_disk_names_the_callback() -> None:
    """It stays an OSError with its number."""
    with pytest.raises(
        OSError, match=r"No space left on device \(in Full\.on_epoch_end on rank 0; free some space"
    ) as caught:
        make(callbacks=[Full()]).fit(DATA, global_batch_size=4, nproc_per_node=0, progress=False)
    assert caught.value.errno == 28


def test_fit_reports_parameters_that_no_optimizer_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Above all those that were frozen when it was made, and unfrozen since."""
    model = nn.Linear(2, 1)
    trainer = make(model=model, optimizer=sgd([model.weight]))
    trainer.fit(DATA, epochs=2, global_batch_size=4, nproc_per_node=0, progress=False)
    assert capsys.readouterr().out.count("no optimizer has bias, which are not frozen: they will not be trained") == 1


def test_report_ignored_ranks_states_that_this_process_is_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with torchrun's variables in a notebook's environment."""
    report_ignored_ranks(2)
    assert not capsys.readouterr().err
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    report_ignored_ranks(1)
    assert not capsys.readouterr().err
    report_ignored_ranks(2)
    assert "nproc_per_node=2 is not used: this process is rank 0 of 1 already" in capsys.readouterr().err


def test_fit_takes_a_number_of_epochs_or_a_total() -> None:
    """Not both, of which one would be ignored."""
    with pytest.raises(
        LoopError, match="`epochs=2`, a number of further epochs, and `until_epoch=3`, a total. Give one of"
    ):
        make().fit(DATA, epochs=2, until_epoch=3, global_batch_size=4, nproc_per_node=0)


def test_fit_resumes_with_different_data_on_request(tmp_path: Path) -> None:
    """The error names the option; `repr` shows the position."""
    given: dict[str, Any] = {"global_batch_size": 4, "nproc_per_node": 0, "checkpoint_dir": tmp_path}
    make().fit(DATA, epochs=1, **given)
    longer: Dataset[Any] = ConcatDataset([DATA, DATA])
    trainer = make()
    with pytest.raises(ddpilot.CheckpointError, match=r"or fit\(\.\.\., other_data=True\)"):
        trainer.fit(longer, epochs=2, **given)
    trainer.fit(longer, epochs=2, other_data=True, **given)
    assert [row["samples"] for row in trainer.history.epochs] == [len(DATA), 2 * len(DATA)]
    assert re.fullmatch(r"Trainer\(\w+, \d+ parameters to train; epoch 2, \d+ updates\)", repr(trainer))
