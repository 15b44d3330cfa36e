# SPDX-License-Identifier: Apache-2.0
"""The pictures of a profile, and of scaling, as matplotlib figures. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from ddpilot.errors import RecordError
from ddpilot.profiler.phases import SHARES, Phases
from ddpilot.profiler.pictures.charts import LATE, LINES, UNKNOWN, WHITE_TEXT, color_of, format_ms
from ddpilot.profiler.pictures.profile_page import shown_shares
from ddpilot.profiler.pictures.recorded import full_lateness
from ddpilot.profiler.pictures.scaling_page import COLORS, KEPT, Row, ideal_of, spread_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _import_pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise RecordError("plotting", found="matplotlib is not installed", fix="pip install matplotlib") from error
    return pyplot


def plot_profile(phases: Phases, title: str) -> Figure:
    """Return a figure: the mean update of each rank as a stacked bar, and below how late each rank is.

    Raises RecordError if matplotlib is not installed.
    """
    pyplot = _import_pyplot()
    has_heat = len(phases.ranks) > 1 and not numpy.isnan(phases.arrivals_s).all()
    height = 1.4 + 0.4 * len(phases.ranks)
    figure, axes = pyplot.subplots(
        1 + has_heat, 1, figsize=(9, height * (1 + has_heat) + 0.6), squeeze=False, layout="constrained"
    )
    _plot_bars(axes[0, 0], phases)
    if has_heat:
        _plot_lateness(figure, axes[1, 0], phases)
    figure.suptitle(title, fontsize=10)
    pyplot.close(figure)  # otherwise a notebook shows it twice, as it is also the value of the cell
    return figure  # type: ignore[no-any-return]  # of a module that is imported late


def _plot_bars(axes: Any, phases: Phases) -> None:
    means_ms = phases.seconds.mean(axis=1) * 1e3
    rows, begins = numpy.arange(len(phases.ranks)), numpy.zeros(len(phases.ranks))
    longest = means_ms.sum(axis=1).max()
    for name in shown_shares(phases):
        values = means_ms[:, SHARES.index(name)]
        hatch = "///" if name == "waiting" else None
        bars = axes.barh(rows, values, left=begins, color=color_of(name), label=name, hatch=hatch, edgecolor="white")
        labels = [format_ms(value / 1e3) if value > 0.06 * longest else "" for value in values]
        axes.bar_label(bars, labels, label_type="center", fontsize=8, color="white" if name in WHITE_TEXT else "black")
        begins = begins + values
    _plot_overlapped(axes, phases, rows)
    axes.set(yticks=rows, yticklabels=[f"rank {rank}" for rank in phases.ranks], xlabel="ms of an update (mean)")
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _plot_overlapped(axes: Any, phases: Phases, rows: Any) -> None:
    """Draw overlapped communication as thin bars below the others, up to where backward ends: no part of their sum."""
    overlapped = phases.overlapped_s
    if overlapped is None or not overlapped.any():
        return
    ready_ms = 1e3 * phases.seconds.mean(axis=1)[:, : SHARES.index("backward") + 1].sum(axis=1)
    begins_ms = numpy.clip(ready_ms - 1e3 * overlapped, 0, None)
    style = {"color": color_of("communication"), "hatch": "\\\\\\", "edgecolor": "white", "height": 0.12}
    axes.barh(rows + 0.47, 1e3 * overlapped, left=begins_ms, label="overlapped (in parallel)", **style)


def _plot_lateness(figure: Any, axes: Any, phases: Phases) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    late_ms = phases.arrivals_s * 1e3
    colors = LinearSegmentedColormap.from_list("lateness", ["white", LATE])
    most = 1e3 * full_lateness(phases.arrivals_s)
    first = phases.first_update
    extent = (first - 0.5, first + late_ms.shape[1] - 0.5, len(phases.ranks) - 0.5, -0.5)
    image = axes.imshow(late_ms, aspect="auto", cmap=colors, vmin=0, vmax=most, extent=extent, interpolation="nearest")
    axes.set(yticks=range(len(phases.ranks)), yticklabels=[f"rank {rank}" for rank in phases.ranks], xlabel="update")
    axes.set_title("how late each rank comes to the last collective of an update", fontsize=9)
    figure.colorbar(image, ax=axes, label="ms")


def plot_scaling(rows: Sequence[Row], title: str) -> Figure:
    """Return a figure: the speed-up with the ideal line, and what is lost at each number of ranks.

    Raises RecordError if matplotlib is not installed.
    """
    pyplot = _import_pyplot()
    figure, (curve, bars) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    first, ranks = rows[0], [each.num_ranks for each in rows]
    speed_ups = numpy.array([each.speed_up for each in rows])
    spreads = numpy.array([spread_of(each, first) for each in rows])
    errors = numpy.clip([speed_ups - spreads[:, 0], spreads[:, 1] - speed_ups], 0, None)
    curve.plot(ranks, [ideal_of(each, first) for each in rows], "--", color=UNKNOWN, label="ideal")
    curve.errorbar(ranks, speed_ups, errors, marker="o", color=LINES[0], capsize=3, label="measured")
    curve.set(xlabel="ranks", ylabel="speed-up", xticks=ranks, ylim=(0, None))
    curve.grid(alpha=0.3)
    curve.legend(fontsize=8, frameon=False)
    begins = numpy.zeros(len(rows))
    kept = [max(0.0, 1 - sum(each.lost.values())) for each in rows]
    for name, color in COLORS.items():
        values = numpy.array(kept if name == KEPT else [each.lost.get(name, 0.0) for each in rows])
        if values.max() >= 0.001:
            bars.bar([str(each) for each in ranks], 100 * values, bottom=100 * begins, color=color, label=name)
            begins = begins + values
    bars.set(xlabel="ranks", ylabel="% of an update")
    bars.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    pyplot.close(figure)  # as above
    return figure  # type: ignore[no-any-return]
