# SPDX-License-Identifier: Apache-2.0
"""A real Jupyter kernel for tests, and what a front end would show of its cells."""

from __future__ import annotations

import asyncio
import queue
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
LIMIT_S = 60.0

Message = dict[str, Any]


@dataclass
class Cell:
    """What one cell shows, kept as a front end keeps it."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    """In order: {"stream": name, "text": ...}, {"data": ..., "id": display id} or {"error": ename, "text": ...}."""

    messages: list[tuple[float, Message]] = field(default_factory=list)
    """Everything published, with the time (monotonic, s) at which it came."""

    clear_next: bool = False

    @property
    def stdout(self) -> str:
        """All of stdout."""
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        """All of stderr, without colours."""
        return _ANSI.sub("", self._stream("stderr"))

    @property
    def error(self) -> str:
        """The traceback, without colours; "" where the cell went well."""
        return "\n".join(output["text"] for output in self.outputs if "error" in output)

    @property
    def failure(self) -> str:
        """The traceback and stderr, without notes on ranks that wait: on a busy machine they start seconds apart."""
        return self.error + re.sub(r"^ddpilot: ranks? .* (?:has|have) waited .*\n", "", self.stderr, flags=re.MULTILINE)

    @property
    def error_name(self) -> str:
        """The exception's class."""
        return "".join(output["error"] for output in self.outputs if "error" in output)

    @property
    def shown(self) -> list[str]:
        """Objects as text, in order, labels too."""
        return [output["data"].get("text/plain", "") for output in self.outputs if "data" in output]

    @property
    def by_rank(self) -> dict[int, list[str]]:
        """The labelled lines of stdout as each rank printed them.

        Ranks that are 50 ms apart, as on a busy machine, share no line; that they do otherwise is for unit tests.
        """
        lines: dict[int, list[str]] = {}
        for label, text in re.findall(r"^\[ranks? ([\d,-]+)\] (.*)$", self.stdout, re.MULTILINE):
            for part in label.split(","):
                first, _, last = part.partition("-")
                for rank in range(int(first), int(last or first) + 1):
                    lines.setdefault(rank, []).append(text)
        return lines

    def _stream(self, name: str) -> str:
        return "".join(output["text"] for output in self.outputs if output.get("stream") == name)


class Kernel:
    """A kernel that runs cells one after the other. `ask` answers `input()`."""

    def __init__(self) -> None:
        self.manager = KernelManager()
        # History is a file of the user's.
        self.manager.start_kernel(extra_arguments=["--HistoryManager.enabled=False"])
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)
        self.cells: dict[str, Cell] = {}

    def run(
        self,
        source: str,
        *,
        interrupt_on: str | None = None,
        answer: Callable[[str], str] | None = None,
        silent: bool = False,
    ) -> Cell:
        """Run a cell. Press stop when it shows `interrupt_on`; answer its questions with `answer(prompt)`."""
        request = self.client.execute(source, store_history=not silent, silent=silent, allow_stdin=answer is not None)
        cell, end = self.cells.setdefault(request, Cell()), time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            if answer is not None and self.client.stdin_channel.msg_ready():
                self.client.input(answer(self.client.get_stdin_msg()["content"]["prompt"]))
            message = self._next()
            if message is None:
                continue
            is_this = message["parent_header"].get("msg_id") == request
            if is_this and interrupt_on is not None and interrupt_on in cell.stdout:
                interrupt_on = None
                self.manager.interrupt_kernel()
            if is_this and message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return cell
        pytest.fail(f"the cell was not done in {LIMIT_S} s; it showed {cell.outputs}")

    def complete(self, code: str) -> list[str]:
        """What pressing tab at the end of `code` offers."""
        reply: Message = self.client.complete(code, reply=True, timeout=LIMIT_S)
        return list(reply["content"]["matches"])

    def inspect(self, code: str) -> str:
        """What Shift-Tab at the end of `code` shows, without colours; "" for nothing."""
        reply: Message = self.client.inspect(code, reply=True, timeout=LIMIT_S)
        return _ANSI.sub("", reply["content"]["data"].get("text/plain", ""))

    def wait_for(self, is_true: Callable[[], bool], what: str) -> None:
        """Take messages that come between cells until `is_true()`."""
        end = time.monotonic() + LIMIT_S
        while not is_true():
            self._next()
            if time.monotonic() > end:
                pytest.fail(f"{what}: not so within {LIMIT_S} s")

    def _next(self) -> Message | None:
        try:
            message: Message = self.client.get_iopub_msg(timeout=0.05)
        except queue.Empty:
            return None
        cell = self.cells.get(message["parent_header"].get("msg_id", ""))
        if cell is not None:
            cell.messages.append((time.monotonic(), message))
            self._show(cell, message)
        return message

    def _show(self, cell: Cell, message: Message) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "update_display_data":
            for each in self.cells.values():
                for output in each.outputs:
                    if output.get("id") == content["transient"]["display_id"]:
                        output["data"] = content["data"]
            return
        if kind == "clear_output":
            cell.clear_next = True
            if not content["wait"]:
                cell.outputs.clear()
                cell.clear_next = False
            return
        if kind not in ("stream", "display_data", "execute_result", "error"):
            return
        if cell.clear_next:
            cell.outputs.clear()
            cell.clear_next = False
        if kind == "stream":
            last = cell.outputs[-1] if cell.outputs else {}
            if last.get("stream") == content["name"]:
                last["text"] += content["text"]
            else:
                cell.outputs.append({"stream": content["name"], "text": content["text"]})
        elif kind == "error":
            text = _ANSI.sub("", "\n".join(content["traceback"]))
            cell.outputs.append({"error": content["ename"], "text": text})
        else:
            cell.outputs.append({"data": content["data"], "id": content.get("transient", {}).get("display_id")})

    def close(self) -> None:
        """End the kernel as a front end does."""
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        self.manager.cleanup_resources()
        self.manager.context.destroy(linger=0)
        ensure_event_loop().close()  # jupyter_client made it, and leaves it open
        asyncio.set_event_loop(None)


@contextmanager
def kernel_with_ranks(start: str = "%ddp start -n 2") -> Iterator[Kernel]:
    """A kernel in which `start` has started ranks."""
    kernel = Kernel()
    try:
        loaded = kernel.run("%load_ext ddpilot")
        assert loaded.failure == ""
        started = kernel.run(start)
        assert started.error == "", started.error
        yield kernel
    finally:
        kernel.close()
