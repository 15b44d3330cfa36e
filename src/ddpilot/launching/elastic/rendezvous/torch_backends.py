# SPDX-License-Identifier: Apache-2.0
"""Wait in a thread for torch's rendezvous backends, whose C++ calls block signals and show no progress."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from concurrent import futures

from ddpilot.errors import LaunchError, did_you_mean
from ddpilot.group.address import Result, WaitNotices, call_in_thread

_PAUSE_S = 0.1

_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_BACKEND_ENTRIES = "torchrun.handlers"  # entry point group in which torch looks for other packages' backends


def wait_in_thread(call: Callable[[], Result], note: Callable[[str], None], describe: Callable[[float], str]) -> Result:
    """Return or raise what `call` does, which runs in a thread, so that a signal interrupts the wait for it.

    If a signal handler raises, the thread is abandoned. `note` shows a notice now and then; `describe` returns its text
    for the seconds waited.
    """
    answer, notices = call_in_thread(call, "ddpilot-rendezvous"), WaitNotices(note)
    while True:
        try:
            return answer.result(_PAUSE_S)
        except futures.TimeoutError:
            if answer.done():
                raise
            notices.show_if_due(describe(notices.waited_s))


def check_backend(name: str) -> None:
    """Raise LaunchError if torch has no rendezvous backend of that name, including those of installed packages."""
    known = [*_BACKENDS, *sorted(entry.name for entry in importlib.metadata.entry_points(group=_BACKEND_ENTRIES))]
    if name not in known:
        guess = did_you_mean(name, known, show=str)
        fix = f"{guess} Backends are {', '.join(known[:-1])} and {known[-1]}; static is ddpilot's".lstrip()
        raise LaunchError("reading --rdzv-backend", found=f"{name!r}", fix=fix)
