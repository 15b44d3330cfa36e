# SPDX-License-Identifier: Apache-2.0
"""A process writes its stack on request."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddpilot.record.main_thread import ask_stacks, stacks_path
from ddpilot.watch.snapshot.files import take_stacks
from ddpilot.watch.snapshot.model import PythonStack

ENDING = """
import faulthandler, os, sys
from pathlib import Path
from ddpilot.record.main_thread import WATCH_SIGNAL, answer_with_stacks

answer_with_stacks(Path(sys.argv[1]))
os.kill(os.getpid(), WATCH_SIGNAL)
faulthandler.unregister(WATCH_SIGNAL)  # as Python does when it ends
os.kill(os.getpid(), WATCH_SIGNAL)
"""


def test_being_asked_while_it_ends_does_not_kill_a_process(tmp_path: Path) -> None:
    """A request may come while the handlers are removed: the process ends as it would have."""
    done = subprocess.run([sys.executable, "-c", ENDING, str(tmp_path / "stacks")], check=False, timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "stacks").read_text().count("most recent call first") == 1


ANSWERING = """
import ctypes, sys
from pathlib import Path
from ddpilot.record.main_thread import answer_with_stacks

answer_with_stacks(Path(sys.argv[1]))

print(flush=True)
if sys.argv[2] == "loop":
    while True:
        pass
elif sys.argv[2] == "busy":
    while True:
        list(map(lambda number: number + 1, range(50)))
else:
    ctypes.PyDLL(None).getchar()  # keeps the GIL
"""


@contextmanager
def answering(folder: Path, how: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that answers as rank 0: in a "loop", "busy" calling functions, or "stuck" in C with the GIL."""
    command = [sys.executable, "-c", ANSWERING, str(stacks_path(folder, 0)), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_process_that_runs_python_code_survives_being_asked_often(tmp_path: Path) -> None:
    """The fault handler would end it at about one signal in a hundred (Python 3.11 to 3.13)."""
    with answering(tmp_path, "busy") as process:
        stacks = [take_stacks(tmp_path, {0: process.pid}) for _ in range(200)]
        assert process.poll() is None
    functions = {stack.frames[-1].function for found in stacks for stack in found.values()}
    assert functions == {"<module>"}
    assert sum(map(len, stacks)) > 100  # a loaded machine may miss some


def stack_after_print(folder: Path, pid: int) -> PythonStack:
    """The first stack past the line whose output `answering` reads: print() may not have returned yet."""
    line = ANSWERING.splitlines().index("print(flush=True)") + 1
    while True:
        stack = take_stacks(folder, {0: pid})[0]
        if stack.frames[-1].line != line:
            return stack


def test_a_process_whose_gil_is_held_by_c_code_answers(tmp_path: Path) -> None:
    """By the fault handler, which reads frames that do not change."""
    with answering(tmp_path, "stuck") as process:
        stack = stack_after_print(tmp_path, process.pid)
        assert [frame.function for frame in stack.frames] == ["<module>"]
        assert not stack.is_running
        assert process.poll() is None


def test_a_process_in_a_loop_is_known_to_run(tmp_path: Path) -> None:
    """Although it loses the GIL at the same line each time."""
    with answering(tmp_path, "loop") as process:
        assert stack_after_print(tmp_path, process.pid).is_running
        assert process.poll() is None


CONNECTING = """
import sys
from datetime import timedelta
from pathlib import Path
from torch.distributed import TCPStore
from ddpilot.record.main_thread import answer_with_stacks

answer_with_stacks(Path(sys.argv[1]))
print(flush=True)
TCPStore("127.0.0.1", int(sys.argv[2]), 2, False, timeout=timedelta(seconds=60))
"""


def test_a_process_that_connects_to_a_store_answers_by_itself(tmp_path: Path) -> None:
    """A signal would end torch's sleep between two attempts with an error, so that it starts over."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        command = [sys.executable, "-c", CONNECTING, str(stacks_path(tmp_path, 0)), str(free.getsockname()[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(5):
            (text,) = ask_stacks(tmp_path, {0: process.pid}, lambda _: pytest.fail("a signal was sent")).values()
            assert 'File "<string>", line' in text
        assert process.poll() is None
        process.kill()


def test_a_process_whose_answering_thread_gets_no_processor_is_not_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with many more ranks than processors: its main thread may be connecting to a store."""
    with answering(tmp_path, "stuck") as process:
        stack_after_print(tmp_path, process.pid)
        monkeypatch.setattr("ddpilot.record.main_thread._is_answer_due", lambda _: True)
        assert ask_stacks(tmp_path, {0: process.pid}, lambda _: pytest.fail("a signal was sent")) == {}
