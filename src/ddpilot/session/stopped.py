# SPDX-License-Identifier: Apache-2.0
"""The stop button outside a cell: one line that says in which state everything is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from ddpilot.errors import LaunchInterrupted
from ddpilot.findings.words import render_ranks
from ddpilot.session.outcome import Outcome


@contextlib.contextmanager
def saying(text: str) -> Iterator[None]:
    """A stop inside raises LaunchInterrupted with `text`, unless it says already what it has ended."""
    try:
        yield
    except LaunchInterrupted:
        raise
    except KeyboardInterrupt:
        raise LaunchInterrupted(text) from None


def describe_push(names: Iterable[str], outcome: Outcome) -> str:
    """On which ranks variables are set after a push that was stopped: on each it is all of them or none."""
    parts = outcome.parts.values()
    done = sorted(part.rank for part in parts if part.report is not None and part.report.status == "ok")
    dead = sorted(part.rank for part in parts if part.ended is not None)
    left = sorted({part.rank for part in parts} - {*done, *dead})
    states = [
        f"{state} {render_ranks(ranks)}"
        for state, ranks in (("set on", done), ("not set on", left), ("it cost the life of", dead))
        if ranks
    ]
    return f"pushing {', '.join(names)} was stopped: {', '.join(states)}"
