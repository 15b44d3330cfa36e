# SPDX-License-Identifier: Apache-2.0
"""Render the status board as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from ddpilot.findings.text import printable
from ddpilot.session.board.phrases import (
    GPU_NOTE,
    NO_VALUE,
    describe,
    format_bytes,
    format_percent,
    has_gpu,
    summarize,
)
from ddpilot.session.status import RankStatus


def render_board_text(statuses: Sequence[RankStatus], now_s: float) -> str:
    """Return a summary line and one line per rank, without a final newline.

    `now_s` is a time of the monotonic clock.
    """
    with_gpu = has_gpu(statuses)
    header = ("rank", "pid", "CPU", "memory", *(("GPU", "GPU memory") if with_gpu else ()))
    rows = [header, *(_numbers(status, with_gpu) for status in statuses)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    states = ["state", *(_state(status, now_s) for status in statuses)]
    lines = [summarize(statuses, now_s)]
    for row, state in zip(rows, states, strict=True):
        numbers = "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        lines.append(f"{numbers}  {state}")
    return "\n".join([*lines, *([GPU_NOTE] if with_gpu else [])])


def _numbers(status: RankStatus, with_gpu: bool) -> tuple[str, ...]:
    pid = NO_VALUE if status.pid is None else str(status.pid)
    gpu = (format_percent(status.gpu_percent), format_bytes(status.gpu_memory_bytes)) if with_gpu else ()
    return (str(status.rank), pid, format_percent(status.cpu_percent), format_bytes(status.memory_bytes), *gpu)


def _state(status: RankStatus, now_s: float) -> str:
    phrase = describe(status, now_s)
    whole = f"{phrase.text} ({phrase.detail})" if phrase.detail else phrase.text
    return " ".join(printable(whole).split())
