# SPDX-License-Identifier: Apache-2.0
"""A stack that is written down where nobody may ask for it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

from ddpilot.record.connecting import ConnectNotes, connecting_path, may_make_store
from ddpilot.watch.snapshot.stack_files import take_stacks


def frame_of(name: str, file: str = "train.py") -> FrameType:
    """Of a function in `file` that calls `name`."""
    found: list[FrameType] = []
    scope = {name: lambda: found.append(sys._getframe(1))}
    exec(compile(f"def connect():\n    {name}()\nconnect()\n", file, "exec"), scope)
    return found[0]


@pytest.mark.parametrize(
    ("frame", "may"),
    [
        (frame_of("TCPStore"), True),
        (frame_of("sleep"), False),
        (frame_of("sleep", "/x/site-packages/torch/distributed/rendezvous.py"), True),
    ],
)
def test_a_function_that_makes_a_store_is_told_by_the_names_it_uses(frame: FrameType, may: bool) -> None:
    """The call itself is in C++ and no frame."""
    assert may_make_store(frame) is may


def test_the_file_is_there_while_a_store_may_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the main thread's calls, innermost first; it goes when that is over, or a group was entered."""
    path = connecting_path(tmp_path, 1)
    path.write_text("of a process before")
    notes = ConnectNotes(path)
    assert not path.exists()
    frames = {"main": frame_of("TCPStore")}
    monkeypatch.setattr("ddpilot.record.connecting.main_frame", lambda: None)
    notes.tick(is_outside=True)
    assert not path.exists()
    monkeypatch.setattr("ddpilot.record.connecting.main_frame", lambda: frames["main"])
    notes.tick(is_outside=True)
    stacks = take_stacks(tmp_path, {1: 2**22 + 1})
    assert (stacks[1].main_frames[0].file, stacks[1].main_frames[0].function) == ("train.py", "connect")
    frames["main"] = frame_of("sleep")
    notes.tick(is_outside=True)
    assert not path.exists()
    frames["main"] = frame_of("TCPStore")
    notes.tick(is_outside=True)
    assert path.exists()
    notes.tick(is_outside=False)
    assert not path.exists()


def test_without_room_nothing_is_noted_and_nothing_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is asked by a signal then."""
    notes = ConnectNotes(tmp_path / "no-such-folder" / "rank0.connecting")
    monkeypatch.setattr("ddpilot.record.connecting.main_frame", lambda: frame_of("TCPStore"))
    notes.tick(is_outside=True)
    notes.tick(is_outside=False)
    assert list(tmp_path.iterdir()) == []
