# SPDX-License-Identifier: Apache-2.0
"""All exceptions of ddpilot.

All have the same structure: what was being done, what was found, what to do, and on which rank. These parts are
attributes too. Errors can be pickled, since most of them are sent from a rank to its parent.
"""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ddpilot.user_files import user_frames

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class DdpilotError(Exception):
    """Base class of all errors that ddpilot raises.

    - `did`: the action that failed, as a clause ("starting 2 ranks").
    - `found`: what was found instead, with the values.
    - `fix`: what to do, as a sentence.
    - `rank`: the rank that the error is about, or None.
    """

    def __init__(self, did: str, *, found: str, fix: str = "", rank: int | None = None) -> None:
        self.did = did
        self.found = found
        self.fix = fix
        self.rank = rank
        super().__init__(self.render())

    def render(self) -> str:
        """The message: one sentence with `did` and `found`, one with `fix`."""
        where = "" if self.rank is None else f"[rank {self.rank}] "
        todo = f". {self.fix}" if self.fix else ""
        return f"{where}{self.did}: {self.found}{todo}"

    def __str__(self) -> str:
        return self.render()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__.copy())

    def _render_traceback_(self) -> list[str]:
        """Used by IPython, in a notebook and on the ranks of a session: the user's lines and the message.

        Only the message if the user called a magic.
        """
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        with user_tracebacks(self):
            if shell is None or self.__traceback__ is None:
                return [f"{type(self).__name__}: {self.render()}"]
            shown = shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__, tb_offset=0)
            return list(shown)


def chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and the exceptions that it was raised from, as far as Python prints them."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


@contextmanager
def user_tracebacks(error: BaseException) -> Iterator[None]:
    """While entered, tracebacks of `error` and its causes hold the user's lines only; causes without any are hidden."""
    links = list(chain(error))
    kept = [(each, each.__traceback__, each.__cause__, each.__suppress_context__) for each in links]
    try:
        for each in links:
            each.__traceback__ = user_frames(each.__traceback__)
        for each, cause in itertools.pairwise(links):
            if cause.__traceback__ is None:
                each.__cause__ = None
        yield
    finally:
        for each, frames, each_cause, suppresses in kept:
            each.__traceback__, each.__cause__ = frames, each_cause
            each.__suppress_context__ = suppresses


MISSPELT = 0.86
"""Cutoff for names that may also be right ones of something else: `container_id` of sbatch is not `container`."""


def did_you_mean(
    name: str, known: Iterable[str], *, show: Callable[[str], str] = "`{}`".format, cutoff: float = 0.6, num: int = 1
) -> str:
    """Return "Did you mean `...`?" with the names in `known` that are most similar to `name`, or "" if none is similar.

    Names that contain all of a name of several words come first: "global_batch_size" for "batch_size"; then those that
    one slip of the keyboard turns into `name`, and, with a `cutoff` below `MISSPELT`, those that begin with it.
    `show`: how a name is written; `cutoff`: the similarity that other names need, 0 to 1; `num`: how many to show at
    most.
    """
    known = list(known)
    longer = [each for each in known if "_" in name and name in each]
    slips = [each for each in known if _is_slip(name, each)]
    begun = [each for each in known if cutoff < MISSPELT and len(name.lstrip("-")) > 2 and each.startswith(name)]
    near = list(dict.fromkeys([*longer, *slips, *begun, *difflib.get_close_matches(name, known, num, cutoff)]))[:num]
    return f"Did you mean {' or '.join(map(show, near))}?" if near else ""


def _is_slip(name: str, meant: str) -> bool:
    """Return True if `name` is `meant` with one letter more, less or different, or with two neighbours exchanged."""
    start = sum(itertools.accumulate((one == other for one, other in zip(name, meant, strict=False)), min))
    rest, right = name[start:], meant[start:]
    variants = ((rest[1:], right[1:]), (rest[1:], right), (rest, right[1:]), (rest[1::-1] + rest[2:], right))
    return len(name) > 2 and name != meant and any(one == other for one, other in variants)


def list_names(names: Sequence[str], num: int = 5) -> str:
    """Return the first `num` of `names` and how many follow, such as "a, b and 3 more"."""
    return ", ".join(names[:num]) + (f" and {len(names) - num} more" if len(names) > num else "")


def is_known(type_name: str) -> bool:
    """True if `type_name` is an exception of ddpilot, whose message starts with its rank."""
    return type_name in globals()


def _rebuild(cls: type[DdpilotError], state: dict[str, Any]) -> DdpilotError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    error.args = (error.render(),)
    return error


class TopologyError(DdpilotError, ValueError):
    """Environment variables that describe this process contradict each other, or one is missing.

    `variable`: the name of the variable to check first.
    """

    def __init__(self, did: str, *, variable: str, found: str, fix: str = "", rank: int | None = None) -> None:
        self.variable = variable
        super().__init__(did, found=found, fix=fix, rank=rank)


class GroupError(DdpilotError, RuntimeError):
    """A process group could not be entered, left, freed or rebuilt."""


class RendezvousError(GroupError):
    """Not all ranks joined: a wrong address or port, a missing rank (`missing`), or a rank that exists twice."""

    def __init__(
        self, did: str, *, found: str, fix: str = "", rank: int | None = None, missing: tuple[int, ...] = ()
    ) -> None:
        self.missing = missing
        super().__init__(did, found=found, fix=fix, rank=rank)


class RemoteRankError(GroupError):
    """A different rank raised inside a call of all ranks, such as an `on_ranks` function; this rank raises too."""


class LaunchError(DdpilotError, RuntimeError):
    """Ranks could not be started, or the launcher failed. No user code failed."""

    def _render_traceback_(self) -> list[str]:
        """Used by IPython: only the message, since the only line of the user is the call that launches."""
        return [f"{type(self).__name__}: {self.render()}"]


class ShipError(LaunchError, TypeError):
    """A value cannot be sent between parent and ranks. `path` locates it, such as ``args[0].loader.fn``."""

    def __init__(self, did: str, *, path: str, found: str, fix: str = "", rank: int | None = None) -> None:
        self.path = path
        super().__init__(did, found=found, fix=fix, rank=rank)


class LaunchTimeoutError(LaunchError, TimeoutError):
    """A launch took longer than its `timeout_s`. The ranks' Python stacks were printed before they were terminated.

    `findings`: what the watch has found; empty if the job was not watched.
    """

    findings: Sequence[Any] = ()

    def render(self) -> str:
        """The message, then the findings as text."""
        return "\n\n".join([super().render(), *([str(self.findings)] if self.findings else [])])


class WatchError(LaunchError):
    """A job was terminated because of what the watch found: `findings`, at least one of which is an error."""

    def __init__(
        self, did: str, *, found: str, fix: str = "", rank: int | None = None, findings: Sequence[Any] = ()
    ) -> None:
        self.findings = findings
        super().__init__(did, found=found, fix=fix, rank=rank)

    def render(self) -> str:
        """The message, then the findings as text."""
        return "\n\n".join([super().render(), *([str(self.findings)] if self.findings else [])])


class SlurmError(DdpilotError, RuntimeError):
    """Slurm reported an error, or a job cannot be submitted as requested.

    `field`: the field of `JobOptions` at fault, or "". `is_outage`: True if Slurm did not answer, which may be
    temporary.
    """

    def __init__(
        self,
        did: str,
        *,
        found: str,
        fix: str = "",
        rank: int | None = None,
        field: str = "",
        is_outage: bool = False,
    ) -> None:
        self.field = field
        self.is_outage = is_outage
        super().__init__(did, found=found, fix=fix, rank=rank)


class KubernetesError(DdpilotError, ValueError):
    """A manifest cannot be created from these options. `field`: the option of `ddpilot k8s` at fault, or ""."""

    def __init__(self, did: str, *, found: str, fix: str = "", rank: int | None = None, field: str = "") -> None:
        self.field = field
        super().__init__(did, found=found, fix=fix, rank=rank)


class LaunchInterrupted(KeyboardInterrupt):
    """Ctrl-C or the stop button ended a launch; the message reports how each rank ended. All ranks have exited."""

    def _render_traceback_(self) -> list[str]:
        """Used by IPython: one line, since the frame in which the parent waited is of no interest."""
        return [f"KeyboardInterrupt: {self}"]


class DataError(DdpilotError, ValueError):
    """Samples cannot be divided exactly as requested, or a dataset or loader does not meet a requirement for it."""


class RecordError(DdpilotError, RuntimeError):
    """Collectives cannot be recorded as requested, or a file is not a recording that this version can read."""


class LoopError(DdpilotError, RuntimeError):
    """A training loop cannot do what was requested, or not exactly: counts, batches, wrapped models."""


class NonFiniteError(LoopError, ArithmeticError):
    """A loss or a gradient is NaN or infinite. Raised on all ranks; `rank` is the first rank with such a value."""

    def render(self) -> str:
        """The message without the rank prefix: every rank raises it, and `found` lists the ranks with the value."""
        return f"{self.did}: {self.found}. {self.fix}"


class OutOfMemoryError(LoopError, MemoryError):
    """Memory of the device or the machine ran out on `rank`; torch's own error is the cause."""


class CheckpointError(DdpilotError, RuntimeError):
    """A checkpoint or a file of weights could not be written or read."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is incomplete or was changed, or holds objects that cannot be loaded without executing code.

    Nothing was loaded.
    """


class MismatchedCheckpointError(CheckpointError, ValueError):
    """An intact checkpoint belongs to a different model, dataset or run. Nothing was changed."""


class RankError(DdpilotError, RuntimeError):
    """A rank failed: it raised, exited or was killed. If several ranks failed, the earliest that is not a consequence.

    - `rank`: the rank that failed.
    - `host`: name of its machine; "" if ranks of several machines were lost at once.
    - `exitcode`: exit code of the process, minus the signal's number if a signal killed it, 1 for an exception.
    - `signal_name`: such as "SIGKILL", or None.
    - `rank_traceback`: text with source lines, in a session with ANSI colors; "" if there is none.
    - `last_lines`: up to 20 lines of the rank's output.
    - `others`: a sentence about the other ranks.
    - `findings`: what the watch has found, as `Findings`, or ().

    The original exception is chained as `__cause__` if it could be pickled.
    """

    def __init__(
        self,
        did: str,
        *,
        found: str,
        rank: int,
        host: str,
        fix: str = "",
        exitcode: int = 1,
        signal_name: str | None = None,
        rank_traceback: str = "",
        last_lines: tuple[str, ...] = (),
        others: str = "",
    ) -> None:
        self.host = host
        self.exitcode = exitcode
        self.signal_name = signal_name
        self.rank_traceback = rank_traceback
        self.last_lines = last_lines
        self.others = others
        self.findings: Sequence[Any] = ()
        super().__init__(did, found=found, fix=fix, rank=rank)

    def render(self) -> str:
        """The message, then, if present, the rank's traceback, its last lines, `others` and the findings."""
        return _COLOURS.sub("", self._render_coloured())

    def _render_coloured(self) -> str:
        todo = f". {self.fix}" if self.fix else ""
        where = f" on {self.host}" if self.host else ""
        parts = [f"{self.found} ({self.did}{where}){todo}"]
        if self.rank_traceback:
            parts.append(self.rank_traceback.rstrip())
        num_lines = 5 if self.rank_traceback else len(self.last_lines)
        if self.last_lines:
            lines = "\n".join(f"  {line}" for line in self.last_lines[-num_lines:])
            parts.append(f"Last output of rank {self.rank}:\n{lines}")
        if self.others:
            parts.append(self.others)
        if self.findings:
            parts.append(str(self.findings))
        return "\n\n".join(parts)

    def _render_traceback_(self) -> list[str]:
        """Used by IPython: the rank's traceback and its last line instead of the launcher's frames."""
        return [f"RankError: {self._render_coloured()}"]
