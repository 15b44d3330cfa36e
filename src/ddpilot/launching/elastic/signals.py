# SPDX-License-Identifier: Apache-2.0
"""Signals sent to ``ddpilot run``, and the errors they cause."""

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
"""Signals that are passed on to the ranks: torchrun's, and the one that Slurm can send (`--signal=USR1@120`)."""

# torch's agent reads the signals to handle from this variable when it starts ranks.
_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class StopSignal(BaseException):
    """A signal arrived before torch's agent had ranks to pass it on to."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        super().__init__(number.name)


class RunStoppedError(LaunchError):
    """A signal ended the run. `exitcode`: as torchrun's: 1 if ranks were running, 128 + the signal's number if not.

    75 if all ranks have saved a checkpoint and ask to be requeued.
    """

    def __init__(self, did: str, *, found: str, exitcode: int) -> None:
        self.exitcode = exitcode
        super().__init__(did, found=found)


class OutputClosedError(RunStoppedError):
    """The reader of the ranks' output has exited, as after `| head`. The run ends without a long report."""


@contextmanager
def signals_raise(names: Sequence[str]) -> Iterator[None]:
    """Make the signals `names` raise `StopSignal` until torch's agent handles them; restore all handlers on exit."""
    numbers = [signal.Signals[name] for name in names]
    # SIGCHLD too: if a parent process ignored it, which is inherited, exit codes of ranks could not be read.
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
    """Raise LaunchError for a name that is not a signal or that cannot be handled."""
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            fix = "Give names that can be handled, such as SIGTERM,SIGINT,SIGUSR1"
            raise LaunchError("reading --signals-to-handle", found=f"{name!r}", fix=fix)


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    raise StopSignal(signal.Signals(number))
