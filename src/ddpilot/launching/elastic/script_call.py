# SPDX-License-Identifier: Apache-2.0
"""`ScriptCall`: a script as a function, for a launch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import NoReturn

from ddpilot.launching.elastic.options import TargetKind
from ddpilot.launching.elastic.rank_main import run_as_main


class ScriptCall:
    """Runs a script or module as the ``__main__`` of a rank, as in a fresh interpreter except that torch is imported.

    `stdout`: file that receives what rank 0 writes to stdout, if that is not "".
    """

    def __init__(self, name: str, kind: TargetKind, target: str, args: tuple[str, ...], *, stdout: str = "") -> None:
        self.__qualname__ = name
        self._main = (kind, target, args)
        self._stdout = stdout

    def __call__(self) -> None:
        """Run the script; in a rank."""
        import sys

        import torch

        if self._stdout and os.environ["RANK"] == "0":
            descriptor = os.open(self._stdout, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, 1)
            os.close(descriptor)
        # Ranks of a launch seed all devices at random; a fresh interpreter has a fixed seed on accelerators.
        own_seed = torch.initial_seed()
        torch.manual_seed(torch.Generator().initial_seed())
        torch.default_generator.manual_seed(own_seed)
        sys.path.insert(0, "")
        kind, target, args = self._main
        with _hard_exits_raise():
            run_as_main(kind, target, list(args))


@contextlib.contextmanager
def _hard_exits_raise() -> Iterator[None]:
    """Context manager in which `os._exit` raises SystemExit in the main thread of this process.

    Some scripts end with it. A rank of a launch that ends this way has failed, since it reports nothing.
    """
    pid, original = os.getpid(), os._exit

    def leave(status: int) -> NoReturn:
        if os.getpid() == pid and threading.current_thread() is threading.main_thread():
            raise SystemExit(status)
        original(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = original
