# SPDX-License-Identifier: Apache-2.0
"""`History`, the losses and metrics of a training as plain lists of dicts, and its plot."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpilot.checkpoint.host_copy import can_hold
from ddpilot.errors import LoopError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


BOOKKEEPING = (
    *("epoch", "update", "lr", "samples", "seconds", "samples_per_s", "time"),
    *("items_per_s", "flops_per_s", "mfu", "data_wait", "memory_gib"),
)
"""Columns that are neither losses nor metrics, like all that end in "_per_s"."""


@dataclass(repr=False)
class History:
    """The rows of a training, over all of its fits."""

    epochs: list[dict[str, Any]] = field(default_factory=list)
    """One dict per epoch. "epoch" and "update" are numbers, and "loss" is the mean over the epoch's samples, or tokens.
    "lr", "samples", "seconds", "samples_per_s" and "memory_gib" (peak, on accelerators) follow. "data_wait" is the
    share of the time that the slowest rank waited for data. If the loss has a count, such as tokens, "items_per_s" is
    the speed in these items. Values that were passed to `Run.loop.log` have their own names. The validation adds
    "val_loss" and "val_" + name of each metric."""

    updates: list[dict[str, Any]] = field(default_factory=list)
    """{"update", "loss"}: the mean loss over all ranks' samples, at most 1000 rows per epoch. In longer epochs a row is
    the mean of several consecutive updates, with the number of the last update. With `validate_every` in updates, at
    most 100 rows per interval."""

    intervals: list[dict[str, Any]] = field(default_factory=list)
    """One dict per interval of `validate_every` updates, with the names of `epochs`, over the samples of the interval.
    An interval may begin in one epoch and end in the next. [] if epochs are validated; otherwise the rows of `epochs`
    have no "val_..." values."""

    first: dict[str, Any] = field(default_factory=dict)
    """The validation before the first update, with "epoch" and "update" 0, if `fit` was called with `validate_first`;
    {} without."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows with validations: `intervals` if there are any, else `epochs`."""
        return self.intervals or self.epochs

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write `rows` as a table and return its path. Cells that a row lacks are empty. Raises OSError."""
        rows = [flatten(row) for row in self.rows]
        names = list(dict.fromkeys(name for row in rows for name in row))
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
        return Path(path)

    def __repr__(self) -> str:
        last = measured(self.rows[-1]) if self.rows else {}
        values = ", ".join(f"{name}={value:.4g}" for name, value in last.items())
        num_updates = self.updates[-1]["update"] if self.updates else 0
        num_epochs = len({row["epoch"] for row in self.epochs})  # an epoch has several rows if it resumed after a stop
        counts = f"{num_epochs} epoch{'s' * (num_epochs != 1)}, {num_updates} updates"
        return f"History({counts}{'; last: ' * bool(values)}{values})"

    def state_dict(self) -> dict[str, Any]:
        """Return the lists without values that a checkpoint cannot hold; `updates`, which is long, as a tensor."""
        rows, intervals, (first,) = (
            [{name: value for name, value in row.items() if can_hold(value)} for row in some]
            for some in (self.epochs, self.intervals, [self.first])
        )
        names = list(dict.fromkeys(name for row in self.updates for name in row))
        table = [[row.get(name, math.nan) for name in names] for row in self.updates]
        updates = torch.tensor(table, dtype=torch.float64)
        return {"epochs": rows, "intervals": intervals, "names": names, "updates": updates, "first": first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, in place."""
        self.epochs[:] = state["epochs"]
        self.intervals[:] = state.get("intervals", ())
        self.first.clear()
        self.first.update(state.get("first", {}))
        named = (dict(zip(state["names"], row, strict=True)) for row in state["updates"].tolist())
        self.updates[:] = ({**row, "update": int(row["update"])} for row in named)


def flatten(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `row` with nested dicts flattened to "name.key", and tensors as lists."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value.tolist() if hasattr(value, "tolist") else value
    return flat


def measured(row: dict[str, Any]) -> dict[str, float]:
    """Return the losses and metrics of a row of `History.epochs` that are numbers."""
    kept = {name: value for name, value in row.items() if name not in BOOKKEEPING and not name.endswith("_per_s")}
    flat = flatten(kept)
    return {name: value for name, value in flat.items() if isinstance(value, int | float)}


def thin(rows: list[list[float]], limit: int) -> list[tuple[int, list[float]]]:
    """Return at most `limit` sums of consecutive `rows`, each with the number, from 1, of the last row in it."""
    size = -(-len(rows) // limit) or 1
    parts = [(start, rows[start : start + size]) for start in range(0, len(rows), size)]
    return [(start + len(part), [sum(column) for column in zip(*part, strict=True)]) for start, part in parts]


def plot_history(history: History, metrics: Sequence[str] = ()) -> Figure:
    """Return a figure of the losses, and of the metrics next to them if there are any.

    `metrics`: names of the metrics. With several validation sets each metric has a panel of its own, and each set the
    same colour in all of them. The x axis is the epochs (from 1), or the updates if they were validated. Raises
    LoopError if there are no rows, or if matplotlib is not installed.
    """
    unit = "update" if history.intervals else "epoch"
    rows = [(row["update"] if history.intervals else row["epoch"] + 1, measured(row)) for row in history.rows]
    if rows and history.first:
        rows.insert(0, (0, measured(history.first)))
    if not rows:
        raise LoopError("plotting", found="no epoch was recorded yet", fix="Call fit() first.")
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise LoopError("plotting", found="matplotlib is not installed", fix="pip install matplotlib") from error

    names = dict.fromkeys(name for _, row in rows for name in row)
    losses, others = ([name for name in names if name.endswith("loss") == is_loss] for is_loss in (True, False))
    panels, colours = [("loss", losses), *_panels(others, metrics)], _colours(losses, others, metrics)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 3.5), squeeze=False, layout="tight")
    for axis, (title, drawn) in zip(axes[0], panels, strict=True):
        for name in drawn:
            points = [(number, row[name]) for number, row in rows if name in row]
            axis.plot(*zip(*points, strict=True), marker=".", label=name, color=colours.get(name))
        axis.set(xlabel=unit, ylabel=title)
        axis.grid(alpha=0.3)
        axis.legend()
    pyplot.close(figure)  # otherwise a notebook shows it twice, as it is also the value of the cell
    return figure


def _set_of(name: str, metric: str) -> str | None:
    """Return the validation set in `name`, a column of `metric`: "clean" in "val_clean_accuracy"; else None."""
    is_its = name.startswith("val_") and name.endswith(f"_{metric}") and len(name) > len(f"val__{metric}")
    return name[len("val_") : -len(f"_{metric}")] if is_its else None


def _panels(names: list[str], metrics: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return titles and columns of the panels next to the losses: one for each metric of several validation sets."""
    panels = []
    left = list(names)
    for metric in sorted(metrics, key=len, reverse=True):  # "top_1" before "1"
        columns = [name for name in left if name == metric or _set_of(name, metric) is not None]
        if sum(_set_of(name, metric) is not None for name in columns) > 1:
            panels.append((metric, columns))
            left = [name for name in left if name not in columns]
    order = list(metrics)
    panels.sort(key=lambda panel: order.index(panel[0]))
    return [*panels, ("metrics", left)] if left else panels


def _colours(losses: list[str], others: list[str], metrics: Sequence[str]) -> dict[str, str]:
    """Return a colour for the columns of each validation set; the first one is left to the training."""
    found: dict[str, str | None] = {}
    for metric in sorted(("loss", *metrics), key=len):
        found |= {name: part for name in (*losses, *others) if (part := _set_of(name, metric)) is not None}
    sets = list(dict.fromkeys(part for part in found.values() if part is not None))
    return {name: f"C{1 + sets.index(part)}" for name, part in found.items() if part is not None and len(sets) > 1}
