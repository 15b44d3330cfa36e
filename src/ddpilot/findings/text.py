# SPDX-License-Identifier: Apache-2.0
"""Format lists of ranks, and make text safe to print."""

from __future__ import annotations

from collections.abc import Iterable

from ddpilot.errors import DdpilotError

_MIN_CHARS = 32


def render_ranks(ranks: Iterable[int], *, max_chars: int = 60) -> str:
    """Format `ranks` on one line: ``rank 1``, ``ranks 0,2,3``, ``ranks 0-3`` (three or more in a row), ``no rank``.

    A list longer than `max_chars` (at least 32) is shortened in the middle and ends with the number of ranks: ``ranks
    0,2,4,...,4092,4094 (2048 in all)``. Raises `DdpilotError` for a negative rank.
    """
    numbers = sorted(set(ranks))
    if numbers and numbers[0] < 0:
        raise DdpilotError("writing a list of ranks", found=f"rank {numbers[0]}", fix="Ranks count from 0")
    if len(numbers) < 2:
        return f"rank {numbers[0]}" if numbers else "no rank"
    pieces = _join_runs(numbers)
    whole = f"ranks {','.join(pieces)}"
    if len(whole) <= max(max_chars, _MIN_CHARS):
        return whole
    return _shorten(pieces, f" ({len(numbers)} in all)", max(max_chars, _MIN_CHARS))


def _join_runs(numbers: list[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    pieces: list[str] = []
    for run in runs:
        pieces += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return pieces


def _shorten(pieces: list[str], tail: str, max_chars: int) -> str:
    """Keep as many pieces from both ends as fit; the first and the last are always kept."""
    for num_kept in range(min(len(pieces) - 1, max_chars), 1, -1):
        head, end = pieces[: (num_kept + 1) // 2], pieces[-(num_kept // 2) :]
        shortened = f"ranks {','.join(head)},...,{','.join(end)}{tail}"
        if len(shortened) <= max_chars:
            return shortened
    return f"ranks {pieces[0]},...,{pieces[-1]}{tail}"


def printable(text: str) -> str:
    """Return `text` with tabs expanded and all other control characters escaped; line ends are kept.

    The output of a user's program may contain terminal control sequences, which a report must not pass on.
    """
    lines = text.expandtabs(4).splitlines()
    return "\n".join("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines)
