# SPDX-License-Identifier: Apache-2.0
"""Render the status board as text and as HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Literal, NamedTuple

from ddpilot.findings.text import printable
from ddpilot.session.status import CollectiveStatus, RankStatus

Mood = Literal["idle", "busy", "waiting", "dead"]
"""The state of a rank, with busy ranks that wait for other ranks as a separate value."""

NO_VALUE = "-"
GPU_NOTE = "A GPU at 100 % does not mean progress: NCCL kernels spin while a rank waits in a collective."
_WAITS_AFTER_S = 1.0  # training loops spend much of their time in shorter ones
_MOODS: tuple[Mood, ...] = ("dead", "waiting", "busy", "idle")

# JupyterLab's variables follow its theme; the fallbacks are readable on both light and dark backgrounds.
_COLORS: dict[Mood, str] = {
    "idle": "var(--jp-ui-font-color3, #888)",
    "busy": "var(--jp-success-color1, #2e9e44)",
    "waiting": "var(--jp-warn-color1, #c77700)",
    "dead": "var(--jp-error-color1, #d33)",
}
_FAINT = "color:var(--jp-ui-font-color2, inherit)"
_LINE = "var(--jp-border-color2, #8886)"
# Override JupyterLab's table style: striped rows, text aligned to the right, width limited to the content.
_TABLE = "border-collapse:collapse;margin:4px 0;color:inherit;font-size:13px;line-height:1.5;table-layout:auto"
_ROW = f"background:transparent;border:none;border-top:1px solid {_LINE}"
_CELL = "padding:3px 12px 3px 0;border:none;vertical-align:top;white-space:nowrap;max-width:none;"
_NUMBER = f"{_CELL}text-align:right;font-variant-numeric:tabular-nums"
_WORDS = f"{_CELL}text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:22em"  # stable between updates
# Wrapped lines are aligned with the text, not with the dot.
_STATE = "padding-left:15px;text-indent:-15px"
_DETAIL = f"{_FAINT};padding-left:15px;font-size:12px"
_DOT = "display:inline-block;width:8px;height:8px;border-radius:4px;margin-right:7px;background:{color}"


def render_board_text(statuses: Sequence[RankStatus], now_s: float) -> str:
    """Return a summary line and one line per rank, without a final newline.

    `now_s` is a time of the monotonic clock.
    """
    with_gpu = has_gpu(statuses)
    header = ("rank", "pid", "CPU", "memory", *(("GPU", "GPU memory") if with_gpu else ()))
    rows = [header, *((str(each.rank), _pid(each), *_usage(each, with_gpu)) for each in statuses)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    states = ["state", *(_state_text(status, now_s) for status in statuses)]
    lines = [summarize(statuses, now_s)]
    for row, state in zip(rows, states, strict=True):
        numbers = "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        lines.append(f"{numbers}  {state}")
    return "\n".join([*lines, *([GPU_NOTE] if with_gpu else [])])


def _pid(status: RankStatus) -> str:
    return NO_VALUE if status.pid is None else str(status.pid)


def _usage(status: RankStatus, with_gpu: bool) -> tuple[str, ...]:
    gpu = (format_percent(status.gpu_percent), format_bytes(status.gpu_memory_bytes)) if with_gpu else ()
    return (format_percent(status.cpu_percent), format_bytes(status.memory_bytes), *gpu)


def _state_text(status: RankStatus, now_s: float) -> str:
    phrase = describe(status, now_s)
    whole = f"{phrase.text} ({phrase.detail})" if phrase.detail else phrase.text
    return " ".join(printable(whole).split())


def render_board_html(statuses: Sequence[RankStatus], now_s: float) -> str:
    """Return one ``<div>`` without scripts, style sheets or external resources. All text is escaped.

    `now_s` is a time of the monotonic clock.
    """
    with_gpu = has_gpu(statuses)
    names = ("CPU", "memory", *(("GPU", "GPU memory") if with_gpu else ()), "pid")
    header = _head("rank", _NUMBER) + _head("state", _WORDS) + "".join(_head(name, _NUMBER) for name in names)
    rows = "".join(_row(status, describe(status, now_s), with_gpu) for status in statuses)
    note = f'<div style="{_FAINT};font-size:12px">{escape(GPU_NOTE)}</div>' if with_gpu else ""
    return (
        f'<div class="ddpilot-board" style="color:var(--jp-ui-font-color1, inherit)">'
        f"<div>{escape(summarize(statuses, now_s))}</div>"
        f'<table style="{_TABLE}"><thead><tr style="{_ROW};border-top:none">{header}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{note}</div>"
    )


def _head(name: str, style: str) -> str:
    return f'<th style="{style};{_FAINT};font-weight:normal">{name}</th>'


def _row(status: RankStatus, phrase: Phrase, with_gpu: bool) -> str:
    numbers = (*_usage(status, with_gpu), _pid(status))
    cells = "".join(f'<td style="{_NUMBER}">{number}</td>' for number in numbers)
    rank = f'<td style="{_NUMBER}"><b>{status.rank}</b></td>'
    return f'<tr style="{_ROW}">{rank}<td style="{_WORDS}">{_state_html(phrase)}</td>{cells}</tr>'


def _state_html(phrase: Phrase) -> str:
    dot = f'<span style="{_DOT.format(color=_COLORS[phrase.mood])}"></span>'
    detail = f'<div style="{_DETAIL}">{_text(phrase.detail)}</div>' if phrase.detail else ""
    return f'<div style="{_STATE}">{dot}{_text(phrase.text)}</div>{detail}'


def _text(text: str) -> str:
    return escape(printable(text))


class Phrase(NamedTuple):
    """Description of a rank. `text` is what it is doing now; `detail` is additional information, or ""."""

    mood: Mood
    text: str
    detail: str = ""


def describe(status: RankStatus, now_s: float) -> Phrase:
    """Describe what the rank is doing, such as ``waiting in all_reduce for 4 s at Cell In[7]:3``."""
    pending = status.collective
    if status.state == "dead":
        return Phrase("dead", f"dead: {status.reason or 'the reason is not known'}")
    waits = pending is not None and now_s - pending.since_s >= _WAITS_AFTER_S
    if status.state == "idle":
        detail = f"{_name(pending)} has not finished after {_age(pending, now_s)}" if pending and waits else ""
        return Phrase("idle", "idle", detail)
    age = format_duration(now_s - status.since_s)
    doing = f"in cell {status.cell} for {age}" if status.cell is not None else f"busy for {age}"
    if pending is None or not waits:
        return Phrase("busy", doing)
    if not pending.is_watched:
        return Phrase("busy", doing, f"began {_name(pending)} {_age(pending, now_s)} ago; it may be done")
    number = f"collective {pending.seq}, " if pending.seq is not None else ""
    return Phrase("waiting", f"waiting in {_name(pending, _age(pending, now_s))}", f"{number}{doing}")


def summarize(statuses: Sequence[RankStatus], now_s: float) -> str:
    """Count the ranks by mood, such as ``4 ranks: 1 dead, 3 waiting``."""
    moods = Counter(describe(status, now_s).mood for status in statuses)
    parts = ", ".join(f"{moods[mood]} {mood}" for mood in _MOODS if moods[mood])
    return f"{len(statuses)} rank{'' if len(statuses) == 1 else 's'}{': ' if parts else ''}{parts}"


def has_gpu(statuses: Sequence[RankStatus]) -> bool:
    """True if the GPU usage of any rank is known."""
    return any(status.gpu_percent is not None or status.gpu_memory_bytes is not None for status in statuses)


def format_duration(duration_s: float) -> str:
    """Format seconds as ``0 s``, ``59 s``, ``2 min 5 s``, ``3 h 10 min`` or ``2 d 4 h``."""
    whole = max(0, int(duration_s))
    for unit, seconds, smaller, smaller_seconds in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= seconds:
            rest = whole % seconds // smaller_seconds
            return f"{whole // seconds} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def format_bytes(num_bytes: int | None) -> str:
    """Format bytes as ``45 MB`` or ``1.4 GB`` (powers of 1000); ``-`` for None."""
    if num_bytes is None:
        return NO_VALUE
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes < 999.5e6 else f"{num_bytes / 1e9:.1f} GB"


def format_percent(percent: float | None) -> str:
    """Format a percentage as ``7 %``; ``-`` for None."""
    return NO_VALUE if percent is None else f"{percent:.0f} %"


def _name(pending: CollectiveStatus, age: str = "") -> str:
    of_group = f" of group {pending.group}" if pending.group else ""
    duration = f" for {age}" if age else ""
    return f"{pending.op}{of_group}{duration}{f' at {pending.site}' if pending.site else ''}"


def _age(pending: CollectiveStatus, now_s: float) -> str:
    return format_duration(now_s - pending.since_s)
