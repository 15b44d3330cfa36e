# SPDX-License-Identifier: Apache-2.0
"""The pictures of a profile as HTML: bars by rank, a timeline, lateness, durations, memory and a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy

from ddpilot.profiler.phases import SHARES, Phases
from ddpilot.profiler.pictures.charts import (
    LATE,
    LINES,
    OVERLAPPED,
    PAGE,
    STYLE,
    WHITE_TEXT,
    Series,
    axis,
    color_of,
    figure,
    format_ms,
    format_number,
    format_tick,
    legend,
    legend_of_shares,
    line_chart,
    make_ticks,
    row,
    stacked_bar,
    table,
    value_axis,
)
from ddpilot.profiler.pictures.recorded import MemoryCourse, Span, Timeline, full_lateness

_MAX_CELLS, _MAX_COLUMNS, _LEAST_COLUMNS = 9600, 300, 40
_MAX_HIGH = 16
"""Ranks up to which their rows are high enough for labels."""
_MAX_LINES = 8
"""Ranks that have a color of their own in the picture of memory."""
_LEAST_LABELLED = 0.03
"""Part of the width from which a span has a label, which is shown if there is room for it."""
Array = numpy.ndarray[Any, Any]


def render_page(title: str, body: str) -> str:
    """Return a page that needs no other file and no network, and follows the reader's light or dark theme."""
    return PAGE.format(title=escape(title), body=body)


def render_profile(
    phases: Phases, *, headline: str, findings: str, timeline: Timeline | None, memory: MemoryCourse | None
) -> str:
    """Return everything about a profile as one ``<div>``, for a page or a notebook. `findings`: HTML."""
    parts = [
        f"<p><b>{escape(headline)}</b></p>",
        _section("What to change", findings),
        _section("An update on each rank", draw_bars(phases)),
        _section("One update", draw_timeline(timeline)) if timeline is not None else "",
        _section("How late each rank is", draw_lateness(phases)) if len(phases.ranks) > 1 else "",
        _section("Duration of updates", draw_durations(phases)),
        _section("Memory", draw_memory(phases, memory)) if memory is not None else "",
        _section("Milliseconds of an update", draw_table(phases)),
    ]
    return f'<div class="ddpilot-profile"><style>{STYLE}</style>{"".join(parts)}</div>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def rows_class(rows: Sequence[object]) -> str:
    """Return the class of a picture with these rows: many of them are low, and without labels."""
    return "rows dense" if _is_dense(rows) else "rows"


def _is_dense(rows: Sequence[object]) -> bool:
    return len(rows) > _MAX_HIGH


def shown_shares(phases: Phases) -> list[str]:
    """Return the shares in which time was spent."""
    return [name for name in SHARES if phases.share(name).mean() > 1e-7]


def draw_bars(phases: Phases) -> str:
    """Return a bar of the mean update of each rank, and a legend."""
    means = phases.seconds.mean(axis=1)
    longest = float(means.sum(axis=1).max())
    rows = []
    overlapped = None if _is_dense(phases.ranks) else phases.overlapped_s
    for place, (rank, seconds) in enumerate(zip(phases.ranks, means, strict=True)):
        values = [
            (name, float(each), color_of(name), f"{format_ms(each)} ms")
            for name, each in zip(SHARES, seconds, strict=True)
        ]
        rows.append(row(f"rank {rank}", stacked_bar(values, longest), f"{format_ms(seconds.sum())} ms"))
        if overlapped is not None:
            ready = float(seconds[: SHARES.index("backward") + 1].sum())
            rows.append(_overlapped_row(ready, float(overlapped[place]), longest))
    names = [f"{format_ms(phases.median(name))} ms {name}" for name in shown_shares(phases)]
    label = f"Stacked bars of the mean update by rank. Of all ranks: {', '.join(names)}"
    scale = row("", value_axis(longest * 1e3, longest * 1e3, "ms"))
    num = phases.seconds.shape[1]
    text = f"Mean of {num:,} updates. A rank waits in a collective until the last rank has called it."
    text += f" Below a bar: {OVERLAPPED}." if overlapped is not None else ""
    picture = figure([*rows, scale], label, rows_class(phases.ranks))
    return f"<p>{text}</p>{legend_of_shares(shown_shares(phases))}{picture}"


def _overlapped_row(ready_s: float, overlapped_s: float, full: float) -> str:
    """Return a thin bar for what is exchanged before backward is `ready_s`."""
    begin_s = max(0.0, ready_s - overlapped_s)
    drawn = _draw_bucket(begin_s, begin_s + overlapped_s, full, "overlapped communication", is_overlapped=True)
    return row("", f'<div class="thin"><div class="track">{drawn}</div></div>', f"{format_ms(overlapped_s)} ms")


def _draw_bucket(begin_s: float, end_s: float, full: float, name: str, *, is_overlapped: bool) -> str:
    kind = ' class="overlapped"' if is_overlapped else ""
    return (
        f'<span{kind} style="left:{begin_s / full:.3%};width:{(end_s - begin_s) / full:.3%};'
        f'background-color:{color_of("communication")}" title="{name}: {format_ms(end_s - begin_s)} ms"></span>'
    )


def _buckets_row(buckets: Sequence[tuple[float, float]], spans: Sequence[Span], full: float) -> str:
    """Return the exchange of buckets as thin bars, hatched while backward computes."""
    ready = [each.begin_s for each in spans if each.name in ("waiting", "communication")]
    passes = [each for each in spans if each.name == "backward"]
    parts = []
    for begin, end in buckets:
        around = next((each for each in passes if each.begin_s <= begin < each.end_s), None)
        inside = [at for at in ready if around is not None and around.begin_s <= at <= around.end_s]
        middle = min(max(begin, min(inside, default=around.end_s if around is not None else begin)), end)
        for first, last, is_overlapped in ((begin, middle, True), (middle, end, False)):
            if last > first:
                name = "bucket, while backward computes" if is_overlapped else "bucket, after the last gradient"
                parts.append(_draw_bucket(first, last, full, name, is_overlapped=is_overlapped))
    return row("", f'<div class="thin"><div class="track">{"".join(parts)}</div></div>')


def draw_timeline(timeline: Timeline) -> str:
    """Return the spans of one update, the ranks below one another."""
    full = max(timeline.ends_s)
    rows, names = [], dict.fromkeys(each.name for spans in timeline.spans for each in spans)
    none: tuple[tuple[tuple[float, float], ...], ...] = ((),) * len(timeline.ranks)
    buckets = none if _is_dense(timeline.ranks) else timeline.buckets or none
    by_rank = zip(timeline.ranks, timeline.begins_s, timeline.ends_s, timeline.spans, buckets, strict=True)
    for rank, begin, end, spans, exchanged in by_rank:
        whole = Span(begin, end, "other", "")
        parts = [_draw_span(each, full, spans) for each in (whole, *spans)]
        rows.append(row(f"rank {rank}", f'<div class="track">{"".join(parts)}</div>'))
        if exchanged:
            rows.append(_buckets_row(exchanged, spans, full))
    scale = row("", value_axis(full * 1e3, full * 1e3, "ms"))
    length = format_ms(max(end - begin for begin, end in zip(timeline.begins_s, timeline.ends_s, strict=True)))
    text = (
        f"Update {timeline.update}, whose duration is nearest to the median: {length} ms. It begins where the step of "
        "the optimizer before it ends."
    )
    if any(buckets):
        text += " Below a rank: the exchange of DDP's buckets, hatched while backward computes."
    if not timeline.has_one_clock:
        text += " The ranks have different clocks: each one's update begins at 0."
    label = f"Timeline of update {timeline.update} on {len(rows)} ranks"
    shares = [name for name in SHARES if name in names] + ["other"]
    picture = figure([*rows, scale], label, rows_class(timeline.ranks))
    return f"<p>{text}</p>{legend_of_shares(shares)}{picture}"


def _draw_span(span: Span, full: float, all_spans: Sequence[Span]) -> str:
    length = span.end_s - span.begin_s
    kind = ' class="waiting"' if span.name == "waiting" else ""
    title = f"{span.name}: {format_ms(length)} ms, from {format_ms(span.begin_s)} ms on"
    title += f"\n{span.line}" if span.line else ""
    drawn = (
        f'<span{kind} style="left:{span.begin_s / full:.3%};width:{length / full:.3%};'
        f'background-color:{color_of(span.name)}" title="{escape(title)}"></span>'
    )
    # The label stands before the first span inside.
    inner = [each.begin_s for each in all_spans if span.begin_s <= each.begin_s < span.end_s and each is not span]
    room = min([span.end_s, *inner]) - span.begin_s
    if span.name == "other" or room < _LEAST_LABELLED * full:
        return drawn
    white = "white" if span.name in WHITE_TEXT else ""
    return (
        f'{drawn}<span class="label {white}" style="left:{span.begin_s / full:.3%};width:{room / full:.3%}">'
        f"{escape(span.name)}</span>"
    )


def draw_lateness(phases: Phases) -> str:
    """Return a heat map, rank by update, of how late each rank came to the last collective of an update."""
    late = phases.arrivals_s
    if numpy.isnan(late).all():
        return (
            "<p>Nothing is known: the ranks call no collectives, or different numbers of them, or have different "
            "clocks.</p>"
        )
    num_columns = min(late.shape[1], _MAX_COLUMNS, max(_LEAST_COLUMNS, _MAX_CELLS // len(phases.ranks)))
    columns = numpy.array_split(numpy.arange(late.shape[1]), num_columns)
    most = full_lateness(late)
    rows = []
    for place, rank in enumerate(phases.ranks):
        cells = _heat_row(late[place], columns, most, phases.first_update)
        rows.append(row(f"rank {rank}", cells, f"{format_ms(float(numpy.nanmean(late[place])))} ms"))
    first, last = phases.first_update, phases.first_update + late.shape[1] - 1
    scale = row("update", axis(_update_ticks(first, last)))
    means = numpy.nanmean(late, axis=1)
    worst = int(means.argmax())
    label = (
        f"Heat map of lateness by rank and update. Rank {phases.ranks[worst]} is latest: {format_ms(means[worst])} ms "
        "on average"
    )
    grouped = f" Each column is the mean of {len(columns[0])} updates." if len(columns[0]) > 1 else ""
    text = (
        f"Time by which a rank comes to the last collective of an update after the first rank; on the right the mean."
        f'{grouped} <span class="together">0<i class="scale"></i>{format_ms(most)} ms or more</span>'
    )
    return f"<p>{text}</p>{figure([*rows, scale], label, f'{rows_class(rows)} heat')}"


def _heat_row(late: Array, columns: Sequence[Array], most: float, first_update: int) -> str:
    cells = []
    for place, column in enumerate(columns):
        values = late[column]
        if numpy.isnan(values).all():
            continue
        value = float(numpy.nanmean(values))
        opacity = min(1.0, value / most)
        cells.append(
            f'<rect x="{place}" width="1" height="1" fill-opacity="{opacity:.2f}"><title>update '
            f"{first_update + int(column[0])}: {format_ms(value)} ms</title></rect>"
        )
    return (
        f'<div class="track"><svg viewBox="0 0 {len(columns)} 1" preserveAspectRatio="none" fill="{LATE}" '
        f'shape-rendering="crispEdges" aria-hidden="true">{"".join(cells)}</svg></div>'
    )


def _update_ticks(first: int, last: int) -> list[tuple[float, str]]:
    """Return ticks for round numbers of updates between `first` and `last`, which are at 0 and 1."""
    num = max(1, last - first)
    ticks = [value for value in make_ticks(last, 6) if first + 0.1 * num < value < last - 0.12 * num]
    inner = [((value - first) / num, f"{value:,.0f}") for value in ticks if value == int(value)]
    return [(0.0, f"{first:,}"), *inner, (1.0, f"{last:,}")]


def draw_durations(phases: Phases) -> str:
    """Return the duration of each update as a line: of all ranks, as they wait for each other."""
    durations = phases.durations_s.mean(axis=0) * 1e3
    x = numpy.linspace(0, 1, len(durations)) if len(durations) > 1 else numpy.zeros(1)
    series = Series(name="mean of the ranks", color=LINES[0], x=list(x), y=list(durations))
    first, last = phases.first_update, phases.first_update + len(durations) - 1
    median = format_number(float(numpy.median(durations)))
    label = f"Duration of each update: median {median} ms, longest {format_number(float(durations.max()))} ms"
    text = f"Mean of the ranks; the median is {median} ms."
    return f"<p>{text}</p>" + line_chart(
        [series], x_ticks=_update_ticks(first, last), x_name="update", unit="ms", label=label
    )


def draw_memory(phases: Phases, memory: MemoryCourse) -> str:
    """Return memory over time by rank: of the host's process, and of the device if there is one."""
    parts = []
    if any(len(each) for each in memory.device_bytes):
        parts.append(_draw_course(phases, memory, memory.device_bytes, "On the device, allocated by torch"))
    if any(len(each) for each in memory.host_bytes):
        parts.append(_draw_course(phases, memory, memory.host_bytes, "On the host, resident memory of the rank"))
    return "".join(parts) or "<p>No samples were taken.</p>"


def _draw_course(phases: Phases, memory: MemoryCourse, by_rank: Sequence[Array], title: str) -> str:
    longest = max((float(each[-1]) for each in memory.seconds if len(each)), default=0.0) or 1.0
    most = max(float(each.max()) for each in by_rank if len(each))
    unit, size = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    has_colors = len(phases.ranks) <= _MAX_LINES
    series = [
        Series(
            name=f"rank {rank}",
            color=LINES[place] if has_colors else LINES[0],
            x=list(seconds[-len(values) :] / longest),
            y=list(values / size),
        )
        for place, (rank, seconds, values) in enumerate(zip(phases.ranks, memory.seconds, by_rank, strict=True))
        if len(values)
    ]
    highest = max(series, key=lambda each: max(each.y))
    label = f"{title}: at most {format_number(max(highest.y))} {unit}, on {highest.name}"
    ticks = make_ticks(longest, 5)
    step = ticks[1] if len(ticks) > 1 else 1.0
    x_ticks = [(value / longest, format_tick(value, step)) for value in ticks]
    x_ticks[-1] = (x_ticks[-1][0], f"{x_ticks[-1][1]} s")
    keys = legend(((each.name, each.color, each.name) for each in series), is_line=True) if has_colors else ""
    text = f"{title}. At most {format_number(max(highest.y))} {unit}, on {highest.name}."
    return f"<p>{text}</p>{keys}" + line_chart(series, x_ticks=x_ticks, unit=unit, label=label)


def draw_table(phases: Phases) -> str:
    """Return the mean milliseconds of an update, by share and rank."""
    means_ms = phases.seconds.mean(axis=1) * 1e3
    names = shown_shares(phases)
    rows = [[name, *(f"{value:.2f}" for value in means_ms[:, SHARES.index(name)])] for name in names]
    total = ["all", *(f"{value:.2f}" for value in means_ms.sum(axis=1))]
    overlapped = phases.overlapped_s
    feet = [total]
    if overlapped is not None:
        feet.append(["overlapped (not in the sum)", *(f"{each * 1e3:.2f}" for each in overlapped)])
    return table(["share", *(f"rank {rank}" for rank in phases.ranks)], rows, feet)
