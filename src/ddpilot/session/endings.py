# SPDX-License-Identifier: Apache-2.0
"""Describe how the process of a rank ended."""

from __future__ import annotations

from collections.abc import Sequence

from ddpilot.launching.failures import describe_exit
from ddpilot.session.kernels.events import Ended


def describe_end(ended: Ended, was_killed: bool, last_lines: Sequence[str]) -> str:
    """Return the predicate of a sentence about the rank. `was_killed`: True if ddpilot killed it."""
    if ended.exited is None or ended.reason:
        return ended.reason
    if was_killed:
        return "was killed by ddpilot, since nothing else stopped it"
    if ended.exited.signal_name is None:
        return f"exited with code {ended.exited.exitcode}"
    how, _ = describe_exit(ended.exited, "the session", last_lines)
    return how
