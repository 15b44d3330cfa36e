# SPDX-License-Identifier: Apache-2.0
"""Where and how often a loop saves."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from ddpilot.errors import LoopError


@dataclass(frozen=True, kw_only=True)
class KeepOptions:
    """When a loop saves besides the ends of epochs, and what stays. Raises LoopError for what makes no sense."""

    checkpoint_dir: str | os.PathLike[str]
    """A directory of the run's own; made where it is missing."""
    keep: int | None = 3
    """How many of the newest checkpoints stay; None: all."""
    best: str | None = None
    """"max acc" or "min loss": the best by that metric of `save(metrics=)` stays too."""
    save_every_s: float | None = None
    """Seconds after which a checkpoint is made in the middle of an epoch, by the clock of rank 0; None: never."""
    save_every_updates: int | None = None
    """Updates after which one is made; None: never."""
    resume: bool = True
    """Whether to go on from the latest checkpoint; False: begin anew, and move what is there aside."""

    def __post_init__(self) -> None:
        for name in ("save_every_s", "save_every_updates"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise LoopError("making a Loop", found=f"`{name}` is {value}", fix="Pass a number above 0, or None.")
