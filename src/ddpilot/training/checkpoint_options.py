# SPDX-License-Identifier: Apache-2.0
"""`KeepOptions`: the directory, frequency and retention of a loop's checkpoints."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from typing import Any

from ddpilot.errors import LoopError


@dataclass(frozen=True, kw_only=True)
class KeepOptions:
    """Options for checkpoints: where, how often, and which ones to keep. Raises LoopError for invalid values."""

    checkpoint_dir: str | os.PathLike[str]
    """A directory for this run only; created if it does not exist."""
    keep: int | None = 3
    """Number of newest checkpoints to keep; None: all."""
    best: str | None = None
    """"max acc" or "min loss": the best checkpoint by that metric of `save(metrics=)` is kept as well."""
    save_every_s: float | None = None
    """Interval in seconds between checkpoints within an epoch, by the clock of rank 0; None: only after epochs."""
    save_every_updates: int | None = None
    """Interval in updates between checkpoints within an epoch; None: only after epochs."""
    resume: bool = True
    """True: resume from the latest checkpoint; False: start over, and move existing ones to a subdirectory."""

    @classmethod
    def of(cls, checkpoint_dir: str | os.PathLike[str] | None, **given: Any) -> KeepOptions | None:
        """Return the options, or None without a directory. Raises LoopError for other options without a directory."""
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
