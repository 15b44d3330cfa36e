# SPDX-License-Identifier: Apache-2.0
"""Render the status board as an HTML fragment for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ddpilot.findings.text import printable
from ddpilot.session.board.phrases import (
    GPU_NOTE,
    NO_VALUE,
    Mood,
    Phrase,
    describe,
    format_bytes,
    format_percent,
    has_gpu,
    summarize,
)
from ddpilot.session.status import RankStatus

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
    pid = NO_VALUE if status.pid is None else str(status.pid)
    gpu = (format_percent(status.gpu_percent), format_bytes(status.gpu_memory_bytes)) if with_gpu else ()
    numbers = (format_percent(status.cpu_percent), format_bytes(status.memory_bytes), *gpu, pid)
    cells = "".join(f'<td style="{_NUMBER}">{number}</td>' for number in numbers)
    rank = f'<td style="{_NUMBER}"><b>{status.rank}</b></td>'
    return f'<tr style="{_ROW}">{rank}<td style="{_WORDS}">{_state(phrase)}</td>{cells}</tr>'


def _state(phrase: Phrase) -> str:
    dot = f'<span style="{_DOT.format(color=_COLORS[phrase.mood])}"></span>'
    detail = f'<div style="{_DETAIL}">{_text(phrase.detail)}</div>' if phrase.detail else ""
    return f'<div style="{_STATE}">{dot}{_text(phrase.text)}</div>{detail}'


def _text(text: str) -> str:
    return escape(printable(text))
