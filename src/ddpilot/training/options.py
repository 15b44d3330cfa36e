# SPDX-License-Identifier: Apache-2.0
"""Options of a `Loop`, validated before any rank uses them; intervals such as "500 updates"."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from ddpilot.environments.detect import detect_topology
from ddpilot.errors import LoopError, TopologyError, did_you_mean

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
    """Unit of `count`: "updates" or "epochs"."""

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


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def naming_arguments(
    did: str, elsewhere: Mapping[str, str] | None = None
) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """Decorate a method to raise LoopError for unknown arguments, naming a similar one, and for missing ones.

    `did`: what the method does, for the message. `elsewhere`: for arguments that belong to a different method, the text
    that says which.
    """

    def decorate(method: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        own = [one for one in inspect.signature(method).parameters.values() if one.name != "self"]
        known = [one.name for one in own]
        needed = [one.name for one in own if one.default is one.empty]

        @functools.wraps(method)
        def checked(*args: _Given.args, **options: _Given.kwargs) -> _Result:
            for name, value in options.items():
                if name not in known:
                    raise LoopError(
                        did, found=f"`{name}={value!r}`", fix=(elsewhere or {}).get(name) or suggest(name, known)
                    )
            given = {*known[: len(args) - 1], *options}
            if missing := [f"`{name}`" for name in needed if name not in given]:
                found = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
                raise LoopError(did, found=found, fix=f"Give ({', '.join(needed)}, ...).")
            return method(*args, **options)

        return checked

    return decorate


def detect_rank() -> int | None:
    """Return the rank of a process that has not joined its group yet; None if it is alone or the rank is unknown."""
    try:
        topology = detect_topology(os.environ)
    except TopologyError:
        return None
    return topology.rank if topology.world_size > 1 else None


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the hint of an error: the one of `known` that is closest to `name`, or all of them."""
    names = list(known)
    return did_you_mean(name, names, cutoff=0.5) or f"There are {', '.join(names)}."


def check_numbers(*, seed: object, max_time_s: object) -> None:
    """Raise LoopError unless `seed` is an int, and `max_time_s` finite and >= 0, or None."""
    if not _is_integer(seed):
        raise LoopError("making a Loop", found=f"`seed` is {seed!r}", fix="Pass an integer.")
    if max_time_s is not None and not (isinstance(max_time_s, int | float) and 0 <= max_time_s < math.inf):
        found = f"`max_time_s` is {max_time_s!r}"
        raise LoopError("making a Loop", found=found, fix="Pass seconds, 0 or more, or None for no limit.")


def check_clipping(did: str, **limits: Any) -> None:
    """Raise LoopError unless all `limits`, by the names of their arguments, are above 0; inf is allowed."""
    for name, limit in limits.items():
        is_plain = isinstance(limit, int | float) and not isinstance(limit, bool)
        # The value of a tensor is not read: the host would wait for the device.
        if not hasattr(limit, "__float__") or isinstance(limit, bool) or (is_plain and not limit > 0):
            fix = "Give a number above 0, such as 1, 2 or inf." if name.endswith("type") else "Give a limit above 0."
            raise LoopError(did, found=f"`{name}` is {limit!r}", fix=fix)


def check_goal(num_epochs: object, max_updates: object) -> None:
    """Raise LoopError unless there is a number of epochs or of updates, 0 or more, at which `epochs` ends."""
    did = "beginning the epochs"
    if num_epochs is None and max_updates is None:
        fix = "Write loop.epochs(10), or loop.epochs(max_updates=50_000)."
        raise LoopError(did, found="neither a number of epochs nor `max_updates`", fix=fix)
    if max_updates is not None and (not _is_integer(max_updates) or int(max_updates) < 0):  # type: ignore[call-overload]
        raise LoopError(did, found=f"`max_updates` is {max_updates!r}", fix="Pass a number of updates, or None.")


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options for checkpoints: where, how often, and which ones to keep. Raises LoopError for invalid values."""

    checkpoint_dir: str | os.PathLike[str] | None = None
    """A directory for this run only; created if it does not exist. None: no checkpoints."""
    keep: int | None = 3
    """Number of newest checkpoints to keep; None: all."""
    best: str | None = None
    """"max acc" or "min loss": the best checkpoint by that metric of `save(metrics=)` is kept as well."""
    save_every_s: float | None = None
    """Interval in seconds between checkpoints within an epoch, by the clock of rank 0; None: only after epochs."""
    save_every_updates: int | None = None
    """Interval in updates between checkpoints within an epoch; None: only after epochs."""
    save_every: int | str | None = None
    """"500 updates" or "2 epochs", counted over the whole training; an int counts updates. Checkpoints are then saved
    at these points, at the end and when all ranks stop, and not after every epoch."""
    resume: bool = True
    """True: resume from the latest checkpoint; False: start over, and move existing ones to a subdirectory."""
    staging_dir: str | os.PathLike[str] | None = None
    """If `checkpoint_dir` is a URL: local directory below which checkpoints are written before they are uploaded; None:
    DDPILOT_STAGING_DIR, else ~/.cache/ddpilot/checkpoints."""

    def __post_init__(self) -> None:
        resume: object = self.resume
        if not isinstance(resume, bool):
            fix = "Pass True to resume from the latest checkpoint if there is one, or False to start over."
            raise LoopError("making a Loop", found=f"`resume` is {resume!r}", fix=fix)
        if self.checkpoint_dir is not None and not os.fspath(self.checkpoint_dir):
            raise LoopError("making a Loop", found="`checkpoint_dir` is empty", fix="Name a directory, or pass None.")
        for name in ("save_every_s", "save_every_updates"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise LoopError("making a Loop", found=f"`{name}` is {value}", fix="Pass a number above 0, or None.")
        if self.interval is not None and self.save_every_updates is not None:
            found = f"`save_every={self.save_every!r}` and `save_every_updates={self.save_every_updates}`"
            raise LoopError("making a Loop", found=found, fix="Pass one of the two.")

    @property
    def interval(self) -> Interval | None:
        """The interval that `save_every` describes."""
        given = self.save_every
        return None if given is None else Interval.parse(given, did="making a Loop", name="save_every")

    def check_unused(self) -> None:
        """Raise LoopError for an option that has no effect without a `checkpoint_dir`; `resume` may be set."""
        for name, value in keywords_of(self).items():
            if name != "resume":
                found = f"`{name}` is {value!r}, and there is no `checkpoint_dir`, so no checkpoints are made"
                raise LoopError("making a Loop", found=found, fix="Pass `checkpoint_dir=`.")


def keywords_of(options: Any) -> dict[str, Any]:
    """Return options as keyword arguments: of a mapping its items, of a dataclass the fields that differ from defaults.

    None has no keywords.
    """
    if not is_dataclass(options):
        return dict(options or {})
    keywords: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name == "more":  # further arguments of DistributedDataParallel
            keywords |= value
        elif value is not field.default and (field.default is None or value != field.default):  # it may be an array
            keywords[field.name] = value
    return keywords
