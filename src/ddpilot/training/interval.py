# SPDX-License-Identifier: Apache-2.0
"""`Interval`: every so many updates or epochs, parsed from an int or a text such as "500 updates" or "1 epoch"."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from ddpilot.errors import LoopError

Unit = Literal["updates", "epochs"]

_UNITS: dict[str, Unit] = {"update": "updates", "updates": "updates", "epoch": "epochs", "epochs": "epochs"}
_OTHER_NAMES: dict[str, Unit] = {
    **dict.fromkeys(("step", "steps", "iteration", "iterations", "iter", "iters", "it", "batch", "ba"), "updates"),
    **dict.fromkeys(("batches", "optimizer steps", "u"), "updates"),
    **dict.fromkeys(("ep", "eps", "pass", "passes", "e"), "epochs"),
}
_TEXT = re.compile(r"(?P<count>[-+]?[\d_]+(?:\.\d*)?)?\s*(?P<unit>[A-Za-z ]*)")


@dataclass(frozen=True)
class Interval:
    """Every `count` updates or epochs, counted over the whole training."""

    count: int
    """1 or more."""
    unit: Unit
    """What is counted: "updates" or "epochs"."""

    @classmethod
    def parse(cls, given: object, *, did: str, name: str, unit: Unit = "updates") -> Interval:
        """Parse an int, which counts `unit`, or a text: "500 updates", "1 epoch". An `Interval` is returned unchanged.

        `did`, `name`: what was done and the name of the argument, for errors. Raises LoopError with the right spelling.
        """
        if isinstance(given, Interval):
            return given
        if isinstance(given, int) and not isinstance(given, bool):
            found: Interval | None = cls(given, unit) if given > 0 else None
        else:
            found = _read(given) if isinstance(given, str) else None
        if found is None:
            raise LoopError(did, found=f"`{name}` is {given!r}", fix=_propose(given, unit))
        return found

    @property
    def counts_updates(self) -> bool:
        """True if it counts updates."""
        return self.unit == "updates"

    def is_due(self, before: int, now: int) -> bool:
        """True if a multiple of `count` is above `before` and not above `now`, both numbers of updates or epochs."""
        return now // self.count > before // self.count

    def __str__(self) -> str:
        return f"{self.count} {self.unit if self.count > 1 else self.unit[:-1]}"


EACH_UPDATE = Interval(1, "updates")
EACH_EPOCH = Interval(1, "epochs")


def _read(text: str) -> Interval | None:
    """Return the interval that `text` is spelled as, or None."""
    count, _, unit = text.strip().partition(" ")
    is_whole = re.fullmatch(r"\d[\d_]*", count) is not None and not count.endswith("_")
    kind = _UNITS.get(unit.strip())
    return Interval(int(count), kind) if is_whole and kind is not None and int(count) > 0 else None


def _propose(given: object, unit: Unit) -> str:
    """Return the advice of an error: the spelling that was probably meant."""
    usual = f'Give a number of {unit}, 1 or more, or a text: "500 updates" or "1 epoch".'
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return usual
    parts = _TEXT.fullmatch(str(given).strip().lower())
    if parts is None or not parts[0]:
        return usual
    meant = _unit_of(parts["unit"].strip()) if parts["unit"].strip() else unit
    number = float(parts["count"].replace("_", "")) if parts["count"] else 1.0
    if meant is None or number < 1 or number != int(number):
        return usual
    return f'Did you mean "{Interval(int(number), meant)}"?'


def _unit_of(word: str) -> Unit | None:
    known: dict[str, Unit] = {**_UNITS, **_OTHER_NAMES}
    near = [word] if word in known else difflib.get_close_matches(word, _UNITS, n=1, cutoff=0.6)
    return known[near[0]] if near else None
