# SPDX-License-Identifier: Apache-2.0
"""Every exception of ddpilot.

One shape for all of them: what you did, what was found, what to do, and on which rank. The pieces stay readable as
attributes, and each error survives pickling, since most of them cross from a rank process to its parent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class DdpilotError(Exception):
    """Base of every error that ddpilot raises.

    `did`: what was being done, as a clause ("starting 2 ranks"); `found`: what was found instead, with the values;
    `fix`: what to do, as a sentence; `rank`: the rank it is about, None where it is about no single rank.
    """

    def __init__(self, did: str, *, found: str, fix: str = "", rank: int | None = None) -> None:
        self.did = did
        self.found = found
        self.fix = fix
        self.rank = rank
        super().__init__(self.render())

    def render(self) -> str:
        """The message: one sentence for what was done and found, one for what to do."""
        where = "" if self.rank is None else f"[rank {self.rank}] "
        todo = f". {self.fix}" if self.fix else ""
        return f"{where}{self.did}: {self.found}{todo}"

    def __str__(self) -> str:
        return self.render()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


def is_known(type_name: str) -> bool:
    """Is `type_name` the name of an exception of ddpilot, whose text begins with its rank?"""
    return type_name in globals()


def _rebuild(cls: type[DdpilotError], state: dict[str, Any]) -> DdpilotError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    error.args = (error.render(),)
    return error


class TopologyError(DdpilotError, ValueError):
    """The variables that say who this process is contradict each other, or one is missing.

    `variable`: the name of the variable to look at first.
    """

    def __init__(self, did: str, *, variable: str, found: str, fix: str = "", rank: int | None = None) -> None:
        self.variable = variable
        super().__init__(did, found=found, fix=fix, rank=rank)


class GroupError(DdpilotError, RuntimeError):
    """A process group could not be entered, left, freed or rebuilt."""


class RendezvousError(GroupError):
    """The ranks did not all meet: an address, a port, a rank that never came (`missing`) or that came twice."""

    def __init__(
        self, did: str, *, found: str, fix: str = "", rank: int | None = None, missing: tuple[int, ...] = ()
    ) -> None:
        self.missing = missing
        super().__init__(did, found=found, fix=fix, rank=rank)


class RemoteRankError(GroupError):
    """Another rank raised inside `on_ranks`; this rank raises too, so that all of them stop at the same call."""


class LaunchError(DdpilotError, RuntimeError):
    """Ranks could not be started, or the machinery around them broke. No user code failed."""

    def _render_traceback_(self) -> list[str]:
        """For IPython: the sentence, since the frames are those of the launcher."""
        return [f"{type(self).__name__}: {self.render()}"]


class ShipError(LaunchError, TypeError):
    """Something cannot travel between parent and ranks. `path` names it, such as ``args[0].loader.fn``."""

    def __init__(self, did: str, *, path: str, found: str, fix: str = "", rank: int | None = None) -> None:
        self.path = path
        super().__init__(did, found=found, fix=fix, rank=rank)


class LaunchTimeoutError(LaunchError, TimeoutError):
    """A launch took longer than its `timeout_s`. The ranks' Python stacks were printed before they were ended.

    `findings`: what was seen from outside until then; empty where the job was not watched.
    """

    findings: Sequence[Any] = ()

    def render(self) -> str:
        """The sentence, then the findings as text."""
        return "\n\n".join([super().render(), *([str(self.findings)] if self.findings else [])])


class WatchError(LaunchError):
    """A job was ended because of what was seen from outside: `findings`, of which one at least is an error."""

    def __init__(
        self, did: str, *, found: str, fix: str = "", rank: int | None = None, findings: Sequence[Any] = ()
    ) -> None:
        self.findings = findings
        super().__init__(did, found=found, fix=fix, rank=rank)

    def render(self) -> str:
        """The sentence, then the findings as text."""
        return "\n\n".join([super().render(), *([str(self.findings)] if self.findings else [])])


class LaunchInterrupted(KeyboardInterrupt):
    """Ctrl-C or the stop button ended a launch; the message says how each rank ended. All of them are gone."""

    def _render_traceback_(self) -> list[str]:
        """For IPython: one line, since where the parent waited says nothing."""
        return [f"KeyboardInterrupt: {self}"]


class DataError(DdpilotError, ValueError):
    """Samples cannot be divided exactly as asked, or a dataset or loader is not what it has to be for that."""


class RecordError(DdpilotError, RuntimeError):
    """Collectives cannot be recorded as asked, or a file is not a recording that this version can read."""


class LoopError(DdpilotError, RuntimeError):
    """A training loop was asked for what cannot be done, or not exactly: counts, batches, wrapped models."""


class NonFiniteError(LoopError, ArithmeticError):
    """A loss or a gradient is NaN or infinite. Raised on all ranks; `rank` is the first where it was."""

    def render(self) -> str:
        """The message, without the rank before it: every rank raises it, and `found` has those where it was."""
        return f"{self.did}: {self.found}. {self.fix}"


class OutOfMemoryError(LoopError, MemoryError):
    """Memory ran out on `rank`, of its device or of the machine; torch's own error is the cause."""


class CheckpointError(DdpilotError, RuntimeError):
    """A checkpoint or a file of weights could not be written or read."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is torn, half written or changed, or holds what only code could rebuild: nothing of it was used."""


class MismatchedCheckpointError(CheckpointError, ValueError):
    """A sound checkpoint belongs to another model, dataset or run. Nothing was changed."""


class RankError(DdpilotError, RuntimeError):
    """A rank failed: it raised, exited or was killed. Of several, the first in time that is not a consequence.

    The original exception is chained as `__cause__` where it could travel. `rank`; `host`: name of the rank's machine;
    `exitcode`: of the process, minus the signal's number where a signal ended it, 1 for an exception; `signal_name`:
    such as "SIGKILL", or None; `rank_traceback`: text with source lines, in a session with ANSI colours, "" where there
    is none; `last_lines`: up to 20 lines of the rank's output; `others`: a sentence on what the other ranks did;
    `findings`: what was seen from outside, `Findings`, or () where nothing was.
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
        """The sentence, the rank's traceback, its last lines, what the others did, findings: where there are."""
        return _COLOURS.sub("", self._render_coloured())

    def _render_coloured(self) -> str:
        todo = f". {self.fix}" if self.fix else ""
        parts = [f"{self.found} ({self.did} on {self.host}){todo}"]
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
        """For IPython: the rank's own traceback and line instead of the frames of the launcher."""
        return [f"RankError: {self._render_coloured()}"]
