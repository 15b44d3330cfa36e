# SPDX-License-Identifier: Apache-2.0
"""The options of watching a job, validated when they are given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from ddpilot.errors import LaunchError
from ddpilot.findings.finding import Finding

Action = Literal["report", "stop"]
FindingCallback = Callable[[Finding], object]
OnFinding = Action | FindingCallback | None


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of watching ranks from outside. Raises LaunchError for an invalid value."""

    watch: bool = True
    """Record the ranks' collectives and report, from outside the ranks, why they do not proceed."""

    guard: bool = True
    """Check for training that continues silently with wrong numbers, such as different gradients. Needs `watch`."""

    on_finding: OnFinding = None
    """"stop": an error ends the job, with the findings in the exception. "report": findings are shown, and the job
    continues. A function is called with each finding, in its own thread; the job continues unless it returns "stop".
    None: "report" in a notebook, else "stop". Warnings alone never stop a job.
    """

    stall_warn_s: float = 30.0
    """Seconds that ranks may wait for a live rank before a warning is reported."""

    def __post_init__(self) -> None:
        for name in ("watch", "guard"):
            if not isinstance(getattr(self, name), bool):
                raise LaunchError(f"reading `{name}`", found=f"{getattr(self, name)!r}", fix="Give True or False")
        action: object = self.on_finding
        if action is not None and not callable(action) and action not in get_args(Action):
            fix = 'Give "report", "stop", a function of one finding, or None'
            raise LaunchError("reading `on_finding`", found=f"{action!r}", fix=fix)
        warn_s: object = self.stall_warn_s
        if not isinstance(warn_s, (int, float)) or isinstance(warn_s, bool) or not warn_s > 0:
            raise LaunchError("reading `stall_warn_s`", found=f"{warn_s!r}", fix="Give seconds, more than 0")

    def action(self) -> Action | FindingCallback:
        """Return the effective value of `on_finding` in this process."""
        if self.on_finding is not None:
            return self.on_finding
        is_kernel = type(sys.stdout).__module__.partition(".")[0] == "ipykernel"
        return "report" if is_kernel else "stop"
