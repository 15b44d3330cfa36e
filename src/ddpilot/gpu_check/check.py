# SPDX-License-Identifier: Apache-2.0
"""`Check` and `Outcome`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "failed", "cannot be shown"]


class CannotBeShownError(Exception):
    """Raised if this machine lacks what the check needs; the message states what."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a check."""

    status: Status
    evidence: str
    """What was observed, with values, in one line."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim and its requirements."""

    name: str
    """Name of the check and of its function."""
    module: str
    """Module of the function, in `ddpilot.gpu_check.checks`."""
    claim: str
    num_devices: int = 1
    """Number of accelerators that it requires; 0: it also runs on the CPU."""
    is_pair: bool = False
    """True if it needs two ranks on the accelerator's own backend. On a single NVIDIA device, these join NCCL as two
    hosts; the check is skipped there if `PAIR_ON_ONE_DEVICE` failed before."""
    only_cuda: bool = False
    """True if it uses the CUDA driver or a `torch.cuda` API that other accelerators do not have."""
    packages: tuple[str, ...] = ()
    """Importable names of optional packages that it requires."""
    limit_s: float = 90.0
    """Seconds after which it fails."""

    @property
    def needs(self) -> str:
        """What the check requires, in words."""
        if self.only_cuda:
            return "NVIDIA"
        return "any" if not self.num_devices else "a device" if self.num_devices == 1 else f"{self.num_devices} devices"


def judge(holds: bool, evidence: str) -> Outcome:
    """Return ok if the claim `holds`, otherwise failed."""
    return Outcome(status="ok" if holds else "failed", evidence=evidence)
