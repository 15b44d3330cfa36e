# SPDX-License-Identifier: Apache-2.0
"""Is forking this process safe?"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ddpilot.launching.rank_server import fork_safety


@contextmanager
def extra_thread(name: str) -> Iterator[None]:
    """A thread that lives inside the block."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name=name)
    thread.start()
    yield
    stop.set()
    thread.join()


def test_clean_watch_blames_the_module_that_started_a_thread() -> None:
    """Threads of before do not count; the first culprit stays the culprit."""
    watch = fork_safety.CleanWatch()
    with extra_thread("old"):
        watch.begin()
        watch.check("numpy")
        with extra_thread("poller"):
            watch.check("my_logger")
            watch.check("another")
        assert str(watch.dirty).startswith("importing `my_logger` started 1 thread (")
        assert "poller" in str(watch.dirty)


def test_clean_watch_blames_the_module_that_initialised_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """An initialized driver is worse than a thread and is reported first."""
    watch = fork_safety.CleanWatch()
    watch.begin()
    monkeypatch.setattr(fork_safety, "cuda_driver_in_use", lambda: True)
    watch.check("cupy")
    assert watch.dirty == "importing `cupy` initialised the CUDA driver"


def test_count_threads_sees_this_process() -> None:
    """One more thread is one more."""
    before = fork_safety.count_threads()
    with extra_thread("one"):
        assert fork_safety.count_threads() == before + 1


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read from /proc")
def test_count_threads_leaves_out_those_that_a_fork_may_meet() -> None:
    """That of jemalloc, which loading `pyarrow` starts, is known by its name."""
    before = fork_safety.count_threads()
    named, stop = threading.Event(), threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(15, b"jemalloc_bg_thd", 0, 0, 0)  # PR_SET_NAME
        named.set()
        stop.wait()

    thread = threading.Thread(target=run)
    thread.start()
    named.wait()
    try:
        assert fork_safety.count_threads() == before
    finally:
        stop.set()
        thread.join()


def test_cuda_driver_in_use_is_false_without_a_driver() -> None:
    """No library of the driver is mapped into this process, so nothing can have been initialised."""
    with open("/proc/self/maps") as maps:
        if "libcuda.so" in maps.read():
            pytest.skip("another test of this process loaded the CUDA driver")
    assert not fork_safety.cuda_driver_in_use()


ENDING = """
import faulthandler, os
from ddpilot.launching.rank_server.fork_safety import STACKS_SIGNAL, write_to

write_to(os.dup(1), os.dup(2))
os.kill(os.getpid(), STACKS_SIGNAL)
faulthandler.unregister(STACKS_SIGNAL)  # as Python does when it ends
os.kill(os.getpid(), STACKS_SIGNAL)
"""


def test_rank_that_is_asked_for_its_stack_while_it_ends_is_not_killed() -> None:
    """The stack is printed while Python can; afterwards the question is passed over."""
    done = subprocess.run([sys.executable, "-c", ENDING], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("most recent call first") == 1


EARLY_INTERRUPT = """
import os, signal, socket
from ddpilot.launching.interrupts import RankInterrupt
from ddpilot.launching.rank_server import rank
from ddpilot.launching.rank_server.fork_safety import become_process_of

become_process_of(os.getppid())
os.kill(os.getpid(), signal.SIGINT)
ours, theirs = socket.socketpair()

def receive(control):
    try:
        with signal.getsignal(signal.SIGINT):
            print("lost", flush=True)
    except KeyboardInterrupt:
        print("kept for the function", flush=True)
    raise rank.fd_socket.Closed

rank.fd_socket.receive = receive
rank.run_rank(ours.detach(), os.dup(1), os.dup(2))
"""


def test_interrupt_of_a_rank_that_is_being_forked_is_kept_for_its_function() -> None:
    """It was raised in the middle of setting up the process, with a traceback of ddpilot's own."""
    done = subprocess.run([sys.executable, "-c", EARLY_INTERRUPT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("kept for the function\n", "", 1)
