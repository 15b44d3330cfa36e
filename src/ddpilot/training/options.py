# SPDX-License-Identifier: Apache-2.0
"""Options of a `Loop`, validated before any rank uses them; `CheckpointOptions`."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ParamSpec, TypeVar

from ddpilot.environments.detect import detect_topology
from ddpilot.errors import LoopError, TopologyError, did_you_mean
from ddpilot.training.interval import Interval

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
