# SPDX-License-Identifier: Apache-2.0
"""What watching a job can be told, checked when it is said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from ddpilot.errors import LaunchError
from ddpilot.findings.finding import Finding

Action = Literal["report", "stop"]
OnFinding = Action | Callable[[Finding], object] | None


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Whether ranks are watched from outside, and what is done about a finding. LaunchError for a wrong value."""

    watch: bool = True
    """Record the ranks' collectives and look from outside what is wrong where they do not get on."""

    guard: bool = True
    """Look for what trains on silently with wrong numbers, such as gradients that differ. Needs `watch`."""

    on_finding: OnFinding = None
    """"stop": an error ends the job, with the findings in the exception. "report": findings are shown, and the job goes
    on. A function is called with each finding, in a thread of its own; the job goes on unless it returns "stop". None:
    "report" in a notebook, else "stop". Warnings never stop a job by themselves."""

    stall_warn_s: float = 30.0
    """Seconds for which ranks may wait for one that is alive before that is a warning."""

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

    def action(self) -> Action | Callable[[Finding], object]:
        """What `on_finding` means in this process."""
        if self.on_finding is not None:
            return self.on_finding
        return "report" if is_notebook() else "stop"


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return type(sys.stdout).__module__.partition(".")[0] == "ipykernel"
