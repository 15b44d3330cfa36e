# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a job, or what it waits for, from one look at it."""

from __future__ import annotations

from dataclasses import dataclass

from ddpilot.findings.sequence import Findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What a look at a job says."""

    findings: Findings
    """What is proven (errors), and what has taken long enough to be said (warnings, info); worst first."""
    status: tuple[str, ...] = ()
    """One line for each thing that is going on and unproven; empty where all is well."""
    is_stalled: bool = False
    """Some rank has waited for others for longer than `stall_s`, or a rank that others wait for is gone."""
    needs_stacks: tuple[int, ...] = ()
    """Ranks whose stacks should be taken before the next look, since the answer depends on them."""
