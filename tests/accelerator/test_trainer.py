# SPDX-License-Identifier: Apache-2.0
"""Trainer on emulated accelerators: the CPU's numbers, resume, NaN, memory that runs out, and no wait of the host."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpilot
from ddpilot.checkpoint.directory import CheckpointDir
from tests.accelerator import SITE, environment, masked_environment, why_not
from tests.accelerator.trainers import Limits, Places, Wide, data_with_nan, evaluate_then_fit, make_adam, make_noisy
from tests.dist.trainer.bodies import BATCH_SIZE, make_data, make_trainer, train_plainly
from tests.preload import BESIDES_TRAINER, PRELOAD
from tests.soak import often

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
    pytest.mark.timeout(200),
]

same = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-13)


@pytest.fixture(autouse=True)
def site_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find modules where this process does; it has no device itself."""
    assert not hasattr(torch, "emu")
    monkeypatch.syspath_prepend(str(SITE))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch's optimizers would set it


def launcher(num_ranks: int) -> ddpilot.Launcher:
    """Ranks with a device each, with a hard limit."""
    return ddpilot.Launcher(timeout_s=100, env=environment(num_ranks), preload=BESIDES_TRAINER)


@often("2")  # four devices: of `Launcher` in test_freeing.py
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_trainer_has_the_numbers_of_a_plain_loop_on_the_cpu(num_ranks: int) -> None:
    """Losses, weights, their average, moments and metrics of three epochs, to 1e-10, with clipping and accumulation."""
    plain, places = train_plainly(3), Places()
    trainer = make_trainer(launcher=launcher(num_ranks), callbacks=[places])
    validation = make_data(21, first=60)
    for num_epochs in (2, 1):
        history = trainer.fit(
            make_data(), validation, epochs=num_epochs, global_batch_size=BATCH_SIZE, nproc_per_node=num_ranks
        )
    assert places.devices == ["emu:0"]
    assert [row["loss"] for row in history.updates] == pytest.approx(plain["updates"], rel=1e-10)
    assert [row["loss"] for row in history.epochs] == pytest.approx(plain["losses"], rel=1e-10)
    for name in ("val_loss", "val_distance", "lr"):
        assert history.epochs[-1][name] == pytest.approx(plain[name], rel=1e-10)
    same(trainer.model.state_dict(), plain["weights"])
    assert trainer.ema is not None
    same(trainer.ema.module.state_dict(), plain["average"])
    optimizer = trainer.optimizers["optimizer"]
    same([optimizer.state[parameter]["exp_avg"] for parameter in trainer.model.parameters()], plain["moments"])


def test_trainer_resumes_exactly_with_the_random_state_of_the_devices(tmp_path: Path) -> None:
    """Two fits of an epoch each, the second one by a new trainer from the checkpoint, are bit for bit one of two."""

    def fit(epochs: int, folder: Path) -> dict[str, torch.Tensor]:
        trainer = make_noisy(launcher(2))
        trainer.fit(make_data(), epochs=epochs, global_batch_size=BATCH_SIZE, nproc_per_node=2, checkpoint_dir=folder)
        return dict(trainer.model.state_dict())

    whole = fit(2, tmp_path / "whole")
    fit(1, tmp_path / "parts")
    resumed = fit(2, tmp_path / "parts")
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


def test_trainer_names_the_batch_with_a_nan_and_saves_no_weights_after_it(tmp_path: Path) -> None:
    """The error has rank, batch and samples, and the checkpoint of the first epoch is the newest."""
    trainer = make_noisy(launcher(2))
    options: dict[str, Any] = {"global_batch_size": 10, "nproc_per_node": 2, "checkpoint_dir": tmp_path}
    trainer.fit(make_data(100), epochs=1, shuffle=False, **options)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(ddpilot.RankError, match=r"the loss is nan in epoch 1, batch 3, of samples 3\d") as caught:
        trainer.fit(data_with_nan(100, at=35), epochs=2, shuffle=False, other_data=True, **options)
    assert "weights that are not finite: none" in str(caught.value)
    with CheckpointDir(tmp_path) as checkpoints:
        found = checkpoints.latest()
    assert found is not None
    weights = found.weights("model")
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_trainer_says_on_which_device_memory_ran_out() -> None:
    """The rank with the small device raises OutOfMemoryError with what to do; the others end with it."""
    trainer = ddpilot.Trainer(Wide(), nn.functional.mse_loss, make_adam, launcher=launcher(2), callbacks=[Limits()])
    data = TensorDataset(torch.ones(256, 4), torch.ones(256, 1))
    with pytest.raises(ddpilot.RankError, match="memory ran out with 64 samples on this rank: emu:1 has") as caught:
        trainer.fit(data, epochs=1, global_batch_size=128, nproc_per_node=2)
    assert caught.value.rank == 1
    assert "Use a smaller batch per rank" in str(caught.value)


def test_an_update_of_trainer_makes_the_host_wait_for_nothing() -> None:
    """With pinned batches, losses on the progress bar, clipping, a schedule and an average of the weights."""
    places = Places(num_warm_up=10)
    trainer = make_trainer(launcher=launcher(2), callbacks=[places], accumulate=1)
    options: dict[str, Any] = {"global_batch_size": 4, "nproc_per_node": 2, "progress": True}
    trainer.fit(make_data(100), epochs=1, loader={"pin_memory": True}, **options)
    assert places.waits == [{}] * 15


def test_a_trainer_on_a_rank_keeps_its_optimizer_when_it_is_asked_before_it_trains() -> None:
    """Parameters stay the same objects when the model moves, also to a device that torch does not know itself."""
    on_cpu = ddpilot.Launcher(nproc_per_node=1, timeout_s=100, env=masked_environment(), preload=PRELOAD)
    ((place, expected),) = on_cpu.run(evaluate_then_fit)
    assert place == "cpu"
    found = replace(launcher(2), nproc_per_node=2, preload=PRELOAD).run(evaluate_then_fit)
    for place, weights in found:
        assert place == "emu"
        assert weights == pytest.approx(expected, rel=1e-10)
