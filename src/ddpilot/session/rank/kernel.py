# SPDX-License-Identifier: Apache-2.0
"""The kernel and the shell of a rank: ipykernel's, which also say when and how a cell failed."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from ipykernel.compiler import XCachingCompiler
from ipykernel.ipkernel import IPythonKernel
from ipykernel.zmqshell import ZMQInteractiveShell
from torch.distributed import distributed_c10d as c10d

from ddpilot.launching.victims import is_victim
from ddpilot.session.rank.tidy import forget_error, tidy
from ddpilot.session.report import FREE, REPORT_KEY, REQUEST, Report

if TYPE_CHECKING:
    from ddpilot.session.rank.requests import Requests


class RankCompiler(XCachingCompiler):  # type: ignore[misc]  # ipykernel is partly untyped
    """Names a cell's code as people do, so that every traceback, stack and ring entry says ``Cell In[7]``."""

    def get_code_name(self, raw_code: str, code: str, number: int) -> str:
        """The file name of a cell's code object."""
        return f"Cell In[{number}]"


class RankShell(ZMQInteractiveShell):  # type: ignore[misc]  # ipykernel is partly untyped
    """Remembers the cell's error and when it came."""

    failure: tuple[BaseException, float] | None = None

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Format the traceback; the session shows that of the rank that failed first."""
        error = (exc_tuple or sys.exc_info())[1]
        if error is not None and self.failure is None:
            self.failure = (error, time.monotonic())
        super().showtraceback(exc_tuple, *args, **kwargs)

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        self._last_traceback = stb

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: a rank has no windows."""


class RankKernel(IPythonKernel):  # type: ignore[misc]  # ipykernel is partly untyped
    """A kernel whose replies carry a `Report`, and that knows two requests more. `requests` does their work."""

    shell_class = RankShell
    compiler_class = RankCompiler
    requests: Requests

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shell_handlers[REQUEST] = self.on_request
        self.control_handlers[FREE] = self.on_free

    async def do_execute(self, code: str, silent: bool, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a cell; the reply says how it ended."""
        shell = self.shell
        about = self.get_parent("shell").get("metadata", {}).get(REPORT_KEY, {})
        shell.execution_count = about.get("cell", shell.execution_count)
        shell.failure = None
        self.requests.space.begin(tuple(about.get("ranks", ())))
        try:
            reply: dict[str, Any] = await super().do_execute(code, silent, *args, **kwargs)
        finally:
            self.requests.space.end()
        reply[REPORT_KEY] = self._report(reply).to_content()
        shell.failure = None
        forget_error(shell)
        return reply

    def _report(self, reply: dict[str, Any]) -> Report:
        has_group = dist.is_initialized()
        if reply["status"] == "ok" or self.shell.failure is None:
            return Report(status="ok", time_s=time.monotonic(), has_group=has_group)
        error, time_s = self.shell.failure
        text = "\n".join(reply.get("traceback", ()))
        return report_error(error, text, time_s)

    async def execute_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Run a cell; collect garbage once the session knows how it ended."""
        await super().execute_request(stream, ident, parent)
        asyncio.get_running_loop().call_soon(tidy, self._keeps_cache(parent))

    def _keeps_cache(self, parent: dict[str, Any]) -> bool:
        about = parent.get("metadata", {}).get(REPORT_KEY, {})
        return bool(about.get("keep_cache", self.requests.space.start.keep_cache))

    async def on_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Serve one of the session's own requests in the main thread, like a cell."""
        content = parent["content"]
        self.requests.space.begin(tuple(content.get("ranks", ())))
        try:
            report = self.requests.serve(content)
        finally:
            self.requests.space.end()
        self.session.send(stream, f"{REQUEST[:-8]}_reply", {REPORT_KEY: report.to_content()}, parent, ident=ident)
        asyncio.get_running_loop().call_soon(tidy, self.requests.space.start.keep_cache)
        if content["verb"] == "finish":
            self.io_loop.add_callback(self.io_loop.stop)

    async def on_free(self, stream: Any, ident: Any, parent: Any) -> None:
        """Free the main thread from a collective; runs in the control channel's thread."""
        from ddpilot.group.free import free_group

        was_in = dist.is_initialized()
        backend = _backend() if was_in else None
        freed = free_group()
        value = {"backend": backend, "still_stuck": list(freed.still_stuck)}
        report = Report(status="ok", time_s=time.monotonic(), has_group=was_in, value=value)
        self.session.send(stream, f"{FREE}_reply", {REPORT_KEY: report.to_content()}, parent, ident=ident)


def _backend() -> str:
    """The default group's backend as it would be asked for."""
    config = str(c10d.get_backend_config())
    names = {part.rpartition(":")[2] for part in config.split(",")}
    return names.pop() if len(names) == 1 else config


def report_error(error: BaseException, text: str, time_s: float) -> Report:
    """The report of a cell or call that ended with `error`."""
    return Report(
        status="error",
        time_s=time_s,
        has_group=dist.is_initialized(),
        type_name=type(error).__qualname__,
        message=str(error),
        traceback=text or "".join(traceback.format_exception(error)),
        is_victim=is_victim(error),
        interrupted=isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)),
    )
