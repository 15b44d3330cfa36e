# SPDX-License-Identifier: Apache-2.0
"""Describe the status of a rank in words, identically in a terminal and a notebook."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ddpilot.session.status import CollectiveStatus, RankStatus

Mood = Literal["idle", "busy", "waiting", "dead"]
"""The state of a rank, with busy ranks that wait for other ranks as a separate value."""

NO_VALUE = "-"
GPU_NOTE = (
    "A GPU at 100 % is no sign of progress: NCCL keeps it spinning while a rank waits for others in a collective."
)
_WAITS_AFTER_S = 1.0  # training loops spend much of their time in shorter ones
_MOODS: tuple[Mood, ...] = ("dead", "waiting", "busy", "idle")


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
        detail = f"{_name(pending)} is not over after {_age(pending, now_s)}" if pending and waits else ""
        return Phrase("idle", "idle", detail)
    age = format_duration(now_s - status.since_s)
    doing = f"in cell {status.cell} for {age}" if status.cell is not None else f"busy for {age}"
    if pending is None or not waits:
        return Phrase("busy", doing)
    if not pending.is_watched:
        return Phrase("busy", doing, f"began {_name(pending)} {_age(pending, now_s)} ago; it may be over")
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
