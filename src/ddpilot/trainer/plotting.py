# SPDX-License-Identifier: Apache-2.0
"""Draws a history. matplotlib is loaded here, and not before somebody wants to see something."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpilot.errors import LoopError
from ddpilot.trainer.history import History, measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_history(history: History) -> Figure:
    """A figure with the losses, and beside them, where there are any, the metrics, over the epochs (from 1)."""
    rows = [(row["epoch"] + 1, measured(row)) for row in history.epochs]
    if not rows:
        raise LoopError("plotting", found="no epoch was recorded yet", fix="Call fit() first.")
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise LoopError("plotting", found="matplotlib is not installed", fix="pip install matplotlib") from error

    names = dict.fromkeys(name for _, row in rows for name in row)
    losses, metrics = ([name for name in names if name.endswith("loss") == is_loss] for is_loss in (True, False))
    panels = [("loss", losses), *([("metrics", metrics)] if metrics else [])]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 3.5), squeeze=False, layout="tight")
    for axis, (title, drawn) in zip(axes[0], panels, strict=True):
        for name in drawn:
            points = [(epoch, row[name]) for epoch, row in rows if name in row]
            axis.plot(*zip(*points, strict=True), marker=".", label=name)
        axis.set(xlabel="epoch", ylabel=title)
        axis.grid(alpha=0.3)
        axis.legend()
    pyplot.close(figure)  # else a notebook shows it twice: once as what the cell returns
    return figure
