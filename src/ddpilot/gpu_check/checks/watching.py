# SPDX-License-Identifier: Apache-2.0
"""Check that hangs and mismatches of two ranks are reported with ranks and lines, and slow ranks are not."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from ddpilot.errors import WatchError
from ddpilot.gpu_check.check import Outcome, judge
from ddpilot.gpu_check.checks import programs
from ddpilot.gpu_check.checks.accelerator import import_copy, run_ranks

_NAMED_S = 5.0
"""Seconds from the last progress to the end of the launch."""


def hang_is_named() -> Outcome:
    """One rank ends early while the other's device waits for it in DDP's backward."""
    return _expect_finding("end_early", {"DDP208"}, rank=1)


def mismatch_is_named() -> Outcome:
    """Ranks call different collectives under the same number."""
    return _expect_finding("call_differently", {"DDP201"}, rank=None)


def skipped_backward_is_named() -> Outcome:
    """One rank skips the backward of a bad sample and waits in a barrier; the other is in its backward."""
    return _expect_finding("skip_backward", {"DDP201", "DDP208", "DDP210"}, rank=None)


def slow_ranks_are_left_alone() -> Outcome:
    """A late rank, devices with seconds of queued work, and many quick steps cause no finding."""
    answers = run_ranks(programs.train_slowly, on_finding="stop", stall_warn_s=30.0)
    return judge(
        True, f"no finding in {max(answers):.0f} s of steps, {programs.LATE_S:.0f} s of them late, and queued work"
    )


def _expect_finding(name: str, codes: set[str], rank: int | None) -> Outcome:
    """Return "ok" if the launch of a program ends in time with a finding of `codes` on one of its lines.

    The finding also has to name `rank`, unless this is None.
    """
    with tempfile.TemporaryDirectory() as folder:
        note, copy = Path(folder) / "note", import_copy(folder)
        try:
            run_ranks(getattr(copy, name), note, on_finding="stop")
        except WatchError as error:
            took_s = time.monotonic() - float(note.read_text())
            finding = error.findings[0]
            said = " ".join(str(error.findings).split())[:500]
            names_line = Path(str(copy.__file__)).name in str(error.findings)
            names_rank = rank is None or rank in finding.ranks
            evidence = f"{finding.code} {finding.name} after {took_s:.1f} s, ranks {finding.ranks}: {said}"
            return judge(finding.code in codes and names_line and names_rank and took_s < _NAMED_S, evidence)
    return judge(False, "the launch ended without a finding")
