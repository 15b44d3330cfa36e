# SPDX-License-Identifier: Apache-2.0
"""A history is plain, thin, readable, and survives a checkpoint."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpilot.errors import LoopError
from ddpilot.trainer.history import History, flatten, measured, plot_history, thin

ROWS: list[dict[str, Any]] = [
    {"epoch": 0, "update": 2, "loss": 0.5, "lr": 0.1, "samples": 8, "seconds": 1.0, "samples_per_s": 8.0},
    {"epoch": 1, "update": 4, "loss": 0.25, "val_loss": 0.3, "val_by_class": {"a": 1.0, "b": torch.tensor([1.0, 2.0])}},
]


def make_history() -> History:
    """Two epochs of two updates."""
    return History([dict(row) for row in ROWS], [{"update": n, "loss": 1 / n} for n in (1, 2, 3, 4)])


def test_history_repr_shows_the_last_values() -> None:
    """The numbers of the last epoch, without bookkeeping; an empty one too."""
    assert repr(make_history()) == "History(2 epochs, 4 updates; last: loss=0.25, val_loss=0.3, val_by_class.a=1)"
    assert repr(History()) == "History(0 epochs, 0 updates)"


def test_to_csv_writes_a_table_with_all_columns(tmp_path: Path) -> None:
    """Values of dicts have their own columns, and missing values are empty."""
    path = make_history().to_csv(tmp_path / "history.csv")
    first, second = csv.DictReader(path.open())
    assert (first["loss"], first["val_loss"]) == ("0.5", "")
    assert (second["val_by_class.a"], second["val_by_class.b"], second["lr"]) == ("1.0", "[1.0, 2.0]", "")


def test_state_dict_is_loaded_in_place() -> None:
    """What a checkpoint cannot hold is left out; numbers of updates are whole again."""
    history = make_history()
    history.epochs[0]["val_odd"] = object()
    other = History()
    epochs = other.epochs
    other.load_state_dict(history.state_dict())
    assert other.epochs is epochs
    assert other.epochs[0] == ROWS[0]
    assert other.updates == history.updates
    assert [type(row["update"]) for row in other.updates] == [int] * 4


@pytest.mark.parametrize(
    ("num_rows", "limit", "ends"), [(5, 5, [1, 2, 3, 4, 5]), (5, 2, [3, 5]), (1, 3, [1]), (0, 3, [])]
)
def test_thin_adds_up_neighbours(num_rows: int, limit: int, ends: list[int]) -> None:
    """Nothing is lost, and each row has the number of the last in it."""
    rows = [[1.0, float(number)] for number in range(num_rows)]
    thinned = thin(rows, limit)
    assert [end for end, _ in thinned] == ends
    assert [sum(column) for column in zip(*(sums for _, sums in thinned), strict=True)] == (
        [float(num_rows), sum(range(num_rows))] if num_rows else []
    )


def test_flatten_and_measured_take_dicts_apart() -> None:
    """Names with dots; only numbers are measured."""
    assert flatten({"a": {"b": {"c": 1}}, "d": torch.tensor([1, 2])}) == {"a.b.c": 1, "d": [1, 2]}
    assert measured(ROWS[1]) == {"loss": 0.25, "val_loss": 0.3, "val_by_class.a": 1.0}


@pytest.fixture(scope="module")
def pyplot() -> Any:
    """Takes a second to be imported, and to draw for the first time."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    plot_history(make_history())
    return pyplot


def test_plot_draws_losses_and_metrics_over_epochs(pyplot: Any) -> None:
    """Two panels with a line per name and a point per value; the figure is closed."""
    figure = plot_history(make_history())
    losses, metrics = figure.axes
    assert [line.get_label() for line in losses.lines] == ["loss", "val_loss"]
    drawn = [np.asarray(line.get_xydata()).tolist() for line in losses.lines]
    assert drawn == [[[1, 0.5], [2, 0.25]], [[2, 0.3]]]
    assert [line.get_label() for line in metrics.lines] == ["val_by_class.a"]
    assert pyplot.get_fignums() == []
    with pytest.raises(LoopError, match=r"no epoch was recorded yet\. Call fit\(\) first"):
        plot_history(History())


def test_plot_has_a_panel_for_each_metric_of_several_validation_sets(pyplot: Any) -> None:
    """A set has one colour in all of them; metrics without sets share the last panel, as before."""
    sets = ("clean", "noisy_2")
    columns = ["loss", *(f"val_{name}_{metric}" for metric in ("loss", "top_1", "1") for name in sets), "depth"]
    history = History([{"epoch": epoch, "update": epoch, **dict.fromkeys(columns, 0.5)} for epoch in range(2)])
    axes = plot_history(history, ["top_1", "1"]).axes
    drawn = {axis.get_ylabel(): {str(line.get_label()): line.get_color() for line in axis.lines} for axis in axes}
    assert {title: list(lines) for title, lines in drawn.items()} == {
        "loss": ["loss", "val_clean_loss", "val_noisy_2_loss"],
        "top_1": ["val_clean_top_1", "val_noisy_2_top_1"],
        "1": ["val_clean_1", "val_noisy_2_1"],
        "metrics": ["depth"],
    }
    clean = {colour for lines in drawn.values() for name, colour in lines.items() if "clean" in name}
    noisy = {colour for lines in drawn.values() for name, colour in lines.items() if "noisy" in name}
    assert (len(clean), len(noisy), clean & noisy) == (1, 1, set())
    one = History([{"epoch": 0, "update": 1, "loss": 1.0, "val_loss": 1.0, "val_a": 1.0, "val_b": 1.0}])
    assert [axis.get_ylabel() for axis in plot_history(one, ["a", "b"]).axes] == ["loss", "metrics"]
