# SPDX-License-Identifier: Apache-2.0
"""Signals to `ddpilot run`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ddpilot.errors import LaunchError

DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""Signals that are passed on to the ranks: torchrun's, and the one that Slurm is asked for (`--signal=USR1@120`)."""

# torch's agent reads which signals to handle from here, once it starts ranks.
_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class StopSignal(BaseException):
    """A signal came before there were ranks that torch's agent passes it on to."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        super().__init__(number.name)


class RunStoppedError(LaunchError):
    """A signal ended the run. `exitcode`: torchrun's in the same case, 1 with ranks, 128 + the signal's before.

    75 where all ranks have saved where they stand, and ask to be started again.
    """

    def __init__(self, did: str, *, found: str, exitcode: int) -> None:
        self.exitcode = exitcode
        super().__init__(did, found=found)


class OutputClosedError(RunStoppedError):
    """Nobody reads what the ranks print any more, as after `| head`: a reason to end, and none to say much."""


@contextmanager
def signals_raise(names: Sequence[str]) -> Iterator[None]:
    """Let the signals `names` raise `StopSignal` until torch's agent takes them over; everything as before after it."""
    numbers = [signal.Signals[name] for name in names]
    # Where a parent ignored it, which is inherited, nobody could tell how a rank ended.
    before = {number: signal.getsignal(number) for number in (*numbers, signal.SIGCHLD)}
    variable = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = ",".join(names)
    is_main = threading.current_thread() is threading.main_thread()
    try:
        for number in before if is_main else ():
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else _raise)
        yield
    finally:
        for number, handler in before.items() if is_main else ():
            signal.signal(number, handler)
        if variable is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = variable


def check_signals(names: Sequence[str]) -> None:
    """Raise LaunchError for a name that is no signal's, or is one that cannot be handled."""
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            fix = "Give names that can be handled, such as SIGTERM,SIGINT,SIGUSR1"
            raise LaunchError("reading --signals-to-handle", found=f"{name!r}", fix=fix)


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    raise StopSignal(signal.Signals(number))
