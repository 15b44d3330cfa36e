# SPDX-License-Identifier: Apache-2.0
"""Pictures of predictions: valid files that show the model's outputs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot.errors import LoopError
from ddpilot.trainer.callbacks.pictures import Pictures, draw_classes
from tests.unit.trainer.callbacks.fits import DATA, fit, make_trainer

matplotlib = pytest.importorskip("matplotlib", reason="draws with it")


pytestmark = pytest.mark.usefixtures("fonts_are_loaded")


def test_draw_classes_shows_the_prediction_and_the_target_if_it_differs() -> None:
    """In red then; colours stand last in pixels, from 0 to 1."""
    from matplotlib.figure import Figure

    images = torch.randn(3, 3, 4, 5)
    figure = Figure()
    draw_classes(figure, [images, torch.tensor([1, 0, 1])], torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 2.0]]))
    titles = [axis.title for axis in figure.axes]
    assert [(title.get_text(), title.get_color()) for title in titles] == [("1", "k"), ("1 (0)", "r"), ("1", "k")]
    pixels = figure.axes[0].images[0].get_array()
    assert pixels is not None
    assert pixels.shape == (4, 5, 3)
    assert (pixels.min(), pixels.max()) == (0, 1)


def test_pictures_show_the_models_outputs(tmp_path: Path) -> None:
    """Of the same samples after every second epoch, with the current weights, as valid PNG files."""
    seen: list[Any] = []

    def draw(figure: Any, batch: Any, output: torch.Tensor) -> None:
        seen.append((batch[0].tolist(), output))
        figure.add_subplot().plot(output[:, 0])

    pictures = Pictures(DATA, tmp_path / "new", samples=[3, 1], every=2, draw=draw)
    trainer = fit(make_trainer(pictures), 4)
    x = DATA.tensors[0][[3, 1]]
    assert [batch for batch, _ in seen] == [x.tolist()] * 2
    assert torch.equal(seen[1][1], trainer.model(x))
    assert pictures.paths == [str(tmp_path / "new" / f"epoch-000{number}.png") for number in (1, 3)]
    from matplotlib.image import imread

    assert [imread(path).shape for path in pictures.paths] == [(450, 800, 4)] * 2
    assert trainer.model.training


def test_pictures_explain_how_to_draw_other_samples_than_images(tmp_path: Path) -> None:
    """With the shapes."""
    with pytest.raises(LoopError, match=r"samples are of shape \(8, 2\) and outputs of shape \(8, 1\). Pass draw="):
        fit(make_trainer(Pictures(DATA, tmp_path)))


def test_pictures_name_a_missing_package_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib is no dependency."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trainer = make_trainer(Pictures(DATA, tmp_path / "new"))
    with pytest.raises(LoopError, match="pip install matplotlib, or leave Pictures out"):
        fit(trainer)
    assert not trainer.history.epochs
    assert not (tmp_path / "new").exists()


def test_pictures_call_a_model_with_all_of_a_batch_but_the_target(tmp_path: Path) -> None:
    """And by name where a batch is a mapping."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.weight * (a - b)

    ones = torch.ones(4, 1)
    outputs: list[float] = []

    def draw(figure: Any, batch: Any, output: torch.Tensor) -> None:
        outputs.append(output[0].item())

    trainer = make_trainer(
        Pictures(TensorDataset(3 * ones, ones, ones), tmp_path, draw=draw),
        Pictures([{"a": torch.ones(1), "b": 5 * torch.ones(1)}], tmp_path, draw=draw),
        forward=lambda model, batch: (model(batch[0], batch[1]), batch[0]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    trainer.model = model = Both()
    trainer.optimizers = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.0)}
    fit(trainer)
    assert outputs == [2.0, -4.0]


def test_pictures_refuse_samples_that_are_not_there(tmp_path: Path) -> None:
    """Instead of leaving them out; the default takes as many as there are."""
    with pytest.raises(LoopError, match="`samples` has 10, -1, and the dataset 10 samples"):
        Pictures(DATA, tmp_path, samples=[0, 10, -1])
    Pictures(torch.utils.data.Subset(DATA, [1, 2]), tmp_path)
