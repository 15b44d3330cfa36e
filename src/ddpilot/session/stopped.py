# SPDX-License-Identifier: Apache-2.0
"""Messages about interrupts outside a cell: what was and was not done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from ddpilot.errors import LaunchInterrupted
from ddpilot.findings.text import render_ranks
from ddpilot.session.execution.outcome import Outcome


@contextlib.contextmanager
def saying(text: str) -> Iterator[None]:
    """Turn a KeyboardInterrupt in the body into LaunchInterrupted with `text`; a LaunchInterrupted is passed on."""
    try:
        yield
    except LaunchInterrupted:
        raise
    except KeyboardInterrupt:
        raise LaunchInterrupted(text) from None


def describe_push(names: Iterable[str], outcome: Outcome) -> str:
    """Describe on which ranks variables are set after an interrupted push. Each rank has set all of them or none."""
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
