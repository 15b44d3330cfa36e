# SPDX-License-Identifier: Apache-2.0
"""What a check is and how it ends. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "failed", "cannot be shown"]


class CannotBeShownError(Exception):
    """This machine lacks what the check needs; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a check ended."""

    status: Status
    evidence: str
    """What was seen, with its values, in one line."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim and what it takes to check it."""

    name: str
    """Also the name of its function."""
    module: str
    """Of the function, in `ddpilot.diagnose.gpu_check.checks`."""
    claim: str
    num_devices: int = 1
    """Accelerators that it needs; 0: it also runs on the CPU."""
    is_pair: bool = False
    """True if it needs two ranks on the accelerator's own backend. On a single NVIDIA device they join NCCL as two
    hosts, if check `PAIR_ON_ONE_DEVICE` did not fail before."""
    only_cuda: bool = False
    """True if it asks the CUDA driver or uses an API of `torch.cuda` that other accelerators do not have."""
    packages: tuple[str, ...] = ()
    """Importable names of optional packages that it needs."""
    limit_s: float = 90.0
    """Seconds after which it has failed."""


def judge(holds: bool, evidence: str) -> Outcome:
    """Ok if the claim `holds`, else failed."""
    return Outcome(status="ok" if holds else "failed", evidence=evidence)
