# SPDX-License-Identifier: Apache-2.0
"""Plot a history. Imports matplotlib only when it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpilot.errors import LoopError
from ddpilot.trainer.history import History, measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_history(history: History) -> Figure:
    """Return a figure of the losses, and of the metrics next to them if there are any, over the epochs (from 1).

    Raises LoopError if there are no epochs, or if matplotlib is not installed.
    """
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
    pyplot.close(figure)  # otherwise a notebook shows it twice, as it is also the value of the cell
    return figure
