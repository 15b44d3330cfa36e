# SPDX-License-Identifier: Apache-2.0
"""Frames of running threads are read while no garbage collection can hand the GIL to them."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest

from ddpilot.environments.interpreter import collector_paused, frames_of_threads, main_frame, reading_frames


def test_collector_paused_leaves_a_disabled_collector_disabled() -> None:
    """The code that disabled it enables it again."""
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


is_lazy = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="only CPython 3.11 collects while frames are read")


class Cycle:
    """Garbage with a finalizer that records its run."""

    num_finalized = 0

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        Cycle.num_finalized += 1


@pytest.fixture
def eager_gc() -> Iterator[None]:
    """Collections at nearly every allocation."""
    before = gc.get_threshold()
    gc.collect()
    Cycle.num_finalized = 0
    yield
    gc.set_threshold(*before)


@is_lazy
def test_no_collection_starts_while_frames_are_read(eager_gc: None) -> None:
    """A finalizer could release the GIL, and the thread leave the frame that is being described."""
    with reading_frames():
        Cycle()
        gc.set_threshold(1)
        kept = [[number] for number in range(100)]
        assert Cycle.num_finalized == 0
    kept += [[number] for number in range(100)]
    assert Cycle.num_finalized == 1


@is_lazy
def test_collector_stays_as_the_user_has_set_it() -> None:
    """Off where the user has turned it off; on again after an error."""
    with pytest.raises(KeyError), reading_frames():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with reading_frames():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_frames_are_those_of_all_threads() -> None:
    """Innermost first, with the names of threads."""
    go, come = threading.Event(), threading.Event()

    def wait_in_thread() -> None:
        come.set()
        go.wait()

    thread = threading.Thread(target=wait_in_thread, name="waits")
    thread.start()
    come.wait()
    try:
        found = [(name, frame.f_code.co_name) for name, frame in frames_of_threads()]
    finally:
        go.set()
        thread.join()
    assert ("waits", "wait_in_thread") in found
    assert found.index(("waits", "wait")) < found.index(("waits", "wait_in_thread"))
    frame = main_frame()
    assert frame is not None
    assert frame.f_code.co_name == "main_frame"
