# SPDX-License-Identifier: Apache-2.0
"""`Option`: one change that is tried, and what several of them are together as a `Trial`. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpilot.profiler.rank.overrides import Trial
from ddpilot.user_files import CodeLine

Kind = Literal["ddp", "loader", "threads", "compression", "environment"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """One change to try. Options with the same `name` exclude each other."""

    kind: Kind
    """The call that takes the change."""
    name: str
    """The argument or the variable, such as ``bucket_cap_mb`` or ``OMP_NUM_THREADS``."""
    value: Any
    before: Any = None
    """The value that the script has now; None if it is not known."""
    also: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the same call, without which this one is of less use."""
    why: str
    """The reason to try it, from the profile."""
    warning: str = ""
    """The effect of the change on numbers, or its requirements; "" if there are none."""
    code: str = ""
    """The finding of the profile whose estimate the trial checks; "" if there is none."""
    lines: tuple[CodeLine, ...] = ()
    """The calls that would have to be changed."""

    @property
    def changes(self) -> dict[str, Any]:
        """The arguments by name."""
        return {self.name: self.value, **self.also}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.changes.items())


def make_trial(options: Sequence[Option], num_updates: int) -> Trial:
    """Return the run of a script with all of `options`, of which no two exclude each other."""
    ddp, loader, environ = (
        {name: value for option in options if option.kind == kind for name, value in option.changes.items()}
        for kind in ("ddp", "loader", "environment")
    )
    threads = next((int(option.value) for option in options if option.kind == "threads"), None)
    return Trial(
        num_updates=num_updates,
        ddp=ddp,
        loader=loader,
        loader_lines=tuple(
            dict.fromkeys(line.position for option in options if option.kind == "loader" for line in option.lines)
        ),
        num_threads=threads,
        compression=next((str(option.value) for option in options if option.kind == "compression"), ""),
        environ={name: str(value) for name, value in environ.items()}
        | ({"OMP_NUM_THREADS": str(threads)} if threads else {}),
    )
