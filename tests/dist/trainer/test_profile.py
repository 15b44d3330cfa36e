# SPDX-License-Identifier: Apache-2.0
"""`Profile` in a fit: shown at its end, with its report; too few updates and errors leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from ddpilot import RankError, RecordError, Trainer
from ddpilot.callbacks import Callback, Profile
from ddpilot.trainer.run import Run


class Fail(Callback):
    """An error in the second update."""

    def on_update_end(self, run: Run) -> None:
        if run.update == 2:
            raise ValueError("planted")


def make_trainer(*callbacks: Callback) -> Trainer:
    """A trainer of a small model."""
    torch.manual_seed(0)
    return Trainer(
        torch.nn.Linear(8, 2),
        torch.nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        callbacks=callbacks,
    )


def test_the_profile_of_a_fit_is_shown_and_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of two ranks, with samples per second; a shorter fit says that it has too few updates."""
    path, data = tmp_path / "profile.html", TensorDataset(torch.randn(160, 8), torch.randint(2, (160,)))
    profile = Profile(path)
    trainer = make_trainer(profile)
    trainer.fit(data, epochs=1, global_batch_size=8, nproc_per_node=2, progress=False)
    assert profile.summary.startswith("16 updates of 2 ranks, from the 5th on: ")
    assert "samples/s" in profile.summary
    shown = capfd.readouterr().out
    assert "X communication" in shown
    assert "d data" in shown
    assert "<svg" in path.read_text("utf-8")
    profile.to_html(tmp_path / "later.html")
    assert "<svg" in (tmp_path / "later.html").read_text("utf-8")
    assert len(profile.plot().axes[0].patches) > 4
    assert "<svg" in str(profile._repr_html_())
    trainer.fit(data, epochs=1, global_batch_size=80, nproc_per_node=2, progress=False)
    assert "no profile: too few updates: 2 on rank 0, 2 on rank 1" in capfd.readouterr().out
    with pytest.raises(RecordError, match="no fit has been profiled"):
        profile.plot()


def test_a_report_that_cannot_be_written_does_not_end_the_fit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The weights are there, and so is the text."""
    data = TensorDataset(torch.randn(160, 8), torch.randint(2, (160,)))
    profile = Profile(tmp_path)
    trainer = make_trainer(profile)
    before = [each.clone() for each in trainer.model.parameters()]
    trainer.fit(data, epochs=1, global_batch_size=8, nproc_per_node=2, progress=False)
    assert profile.summary
    assert f"the report was not written to {tmp_path}: Is a directory" in capfd.readouterr().out
    assert not torch.equal(before[0], next(trainer.model.parameters()))


def test_an_error_ends_the_profile_with_the_fit() -> None:
    """It is the one that was raised."""
    data = TensorDataset(torch.randn(160, 8), torch.randint(2, (160,)))
    with pytest.raises(RankError, match="planted"):
        make_trainer(Profile(), Fail()).fit(data, epochs=1, global_batch_size=8, nproc_per_node=2, progress=False)
