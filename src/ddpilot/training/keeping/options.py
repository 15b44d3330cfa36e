# SPDX-License-Identifier: Apache-2.0
"""Where and how often a loop saves."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from typing import Any

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

    @classmethod
    def of(cls, checkpoint_dir: str | os.PathLike[str] | None, **given: Any) -> KeepOptions | None:
        """The options, or None without a directory. LoopError for what says how to save where nothing is saved."""
        if checkpoint_dir is not None:
            return cls(checkpoint_dir=checkpoint_dir, **given)
        _check_resume(given.get("resume", True))
        defaults = {field.name: field.default for field in fields(cls)}
        for name, value in given.items():
            if name != "resume" and value != defaults[name]:
                found = f"`{name}` is {value!r}, and there is no `checkpoint_dir`, so no checkpoints are made"
                raise LoopError("making a Loop", found=found, fix="Say where with `checkpoint_dir=`.")
        return None

    def __post_init__(self) -> None:
        _check_resume(self.resume)
        if not os.fspath(self.checkpoint_dir):
            raise LoopError("making a Loop", found="`checkpoint_dir` is empty", fix="Name a directory, or pass None.")
        for name in ("save_every_s", "save_every_updates"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise LoopError("making a Loop", found=f"`{name}` is {value}", fix="Pass a number above 0, or None.")


def _check_resume(resume: object) -> None:
    if not isinstance(resume, bool):
        fix = "Pass True to resume from the latest checkpoint if there is one, or False to start from scratch."
        raise LoopError("making a Loop", found=f"`resume` is {resume!r}", fix=fix)
