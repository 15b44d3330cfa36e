# SPDX-License-Identifier: Apache-2.0
"""Building the compiled part of recording: where it goes, and what is said where it cannot be built."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpilot.errors import RecordError
from ddpilot.guard.probes.parameters.ddp_model import look_at_gradients
from ddpilot.record.collectives import native
from ddpilot.record.journal import NUM_STEPS, JournalWriter, read_journal


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the empty cache folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ddpilot"


def make_compiler(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set $CXX to a shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))


def test_built_path_is_another_for_another_torch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was built for one release is never loaded into another."""
    ours = native.built_path()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    theirs = native.built_path()
    assert ours is not None
    assert theirs is not None
    assert (ours.parent, theirs.parent) == (cache, cache)
    assert theirs != ours


def test_build_without_a_compiler_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No files remain."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RecordError) as refused:
        native.build()
    assert "no C++ compiler" in refused.value.found
    assert "apt install g++" in str(refused.value.fix)
    assert not cache.exists()


def test_build_shows_the_first_errors_of_the_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a compiler that is too old; no files remain."""
    make_compiler(tmp_path / "c++", "echo 'x.cpp:1: error: too old' >&2; exit 1", monkeypatch)
    with pytest.raises(RecordError, match="says: x.cpp:1: error: too old"):
        native.build()
    assert list(cache.iterdir()) == []


def test_build_refuses_what_cannot_be_loaded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a compiler that prints and writes nothing."""
    make_compiler(tmp_path / "c++", "exit 0", monkeypatch)
    with pytest.raises(RecordError, match="cannot be loaded"):
        native.build()
    assert list(cache.iterdir()) == []


def test_built_path_does_not_depend_on_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder is ignored; without a home folder there is no place, which is reported."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    path = native.built_path()
    assert path is None or path.is_absolute()
    monkeypatch.setattr("os.path.expanduser", lambda text: text)
    assert native.built_path() is None
    assert native.find("native", print) is None
    with pytest.raises(RecordError, match="no home folder.*XDG_CACHE_HOME"):
        native.build()


def test_load_refuses_what_others_can_write_to(cache: Path) -> None:
    """They could have changed it."""
    cache.mkdir()
    path = cache / "recorder.so"
    path.write_bytes(b"")
    path.chmod(0o666)
    with pytest.raises(ImportError, match="other users can write to"):
        native.load(path)


def test_find_tells_once_why_the_module_is_refused(cache: Path) -> None:
    """Also if recording has reported it before."""
    path = native.built_path()
    assert path is not None
    cache.mkdir()
    path.write_bytes(b"")
    path.chmod(0o666)
    told: list[str] = []
    for _ in range(2):
        assert native.find("auto", told.append) is None
    assert len(told) == 1
    assert f"cannot be used, the one in Python is (other users can write to {path}" in told[0]


def test_build_without_a_place_says_how_to_name_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the home folder is not writable."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    make_compiler(tmp_path / "c++", "exit 0", monkeypatch)
    with pytest.raises(RecordError, match="cannot be kept there") as refused:
        native.build()
    assert "XDG_CACHE_HOME" in str(refused.value.fix)


@pytest.fixture(scope="module")
def compiled() -> Any:
    """The compiled part of recording."""
    if not ((built := native.built_path()) is not None and built.exists()):
        pytest.skip("the compiled part of recording is not built: `ddpilot build-recorder`")
    return native.find("native", print)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_is_surely_finite_says_so_of_what_is_finite_only(compiled: Any, dtype: torch.dtype) -> None:
    """For the largest and the smallest numbers, and not if any element is not finite."""
    info = torch.finfo(dtype)
    numbers = torch.tensor([info.max, info.min, info.tiny, info.smallest_normal / 4, 0.0, -0.0], dtype=dtype)
    for tensor in (numbers, numbers[2:4], numbers[0], torch.nn.Parameter(numbers.clone())):
        assert compiled.is_surely_finite(tensor) is True
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        for place in range(len(numbers)):
            tensor = numbers.clone()
            tensor[place] = value
            assert compiled.is_surely_finite(tensor) is False
            assert compiled.is_surely_finite(tensor[place]) is False


class Marked(Tensor):
    """A subclass, which may store its values anywhere."""


def test_is_surely_finite_leaves_to_an_operator_what_it_does_not_know(compiled: Any) -> None:
    """Different dtypes, layouts and devices, empty and large tensors, subclasses, and objects that are not tensors."""
    plain = torch.zeros(3, 3)
    unknown: list[Any] = [
        plain[:, :2],
        plain[:0],
        plain.long(),
        plain.to_sparse(),
        plain.to("meta"),
        torch.zeros(100_000),
    ]
    unknown += [plain.as_subclass(Marked), torch._efficientzerotensor(3), None, 1.0]
    assert [compiled.is_surely_finite(one) for one in unknown] == [False] * len(unknown)


def train(*parameters: Tensor) -> None:
    """One backward that reaches only these."""
    torch.autograd.backward(torch.cat(parameters).sum())


def look_at_each(look: Callable[..., Any]) -> list[bool]:
    """True for each operation that changes gradients, False for the others."""
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    fleeting = [torch.nn.Parameter(torch.ones(2))]
    state, has_changed_since = look([first, second, *fleeting])
    actions: list[Callable[[], Any]] = [
        lambda: None,
        lambda: train(second),
        lambda: train(second),
        lambda: first.sum(),
        lambda: setattr(second, "grad", None),
        lambda: train(first, fleeting[0]),
        lambda: fleeting[0].grad.zero_(),  # type: ignore[union-attr]
        lambda: first.grad.data.add_(1),  # type: ignore[union-attr]
        lambda: setattr(first, "grad", torch.zeros(2)),
        fleeting.clear,
    ]
    found = []
    for action in actions:
        before = state()
        action()
        found.append(has_changed_since(before))
    return found


def test_compiled_gradients_change_when_those_of_python_do(compiled: Any) -> None:
    """By a backward, by removing, writing or replacing gradients, and with a parameter that was freed."""
    found = look_at_each(compiled.look_at_gradients)
    assert found == look_at_each(look_at_gradients)
    assert found == [False, True, True, False, True, True, True, False, True, True]


def write_steps(writer: JournalWriter, path: Path) -> list[Any]:
    """More ordinary steps than are kept, among other entries, read at the end."""
    writer.write("first", {})
    for number in range(NUM_STEPS):
        writer.write_step(1, number, 1 << 40, "FBFBFBFB")
    writer.write_step(2, 9, -1, "")
    writer.write("step", {"u": 2})
    writer.write_step(2, 10, 5, "FBFBFBFBF")
    writer.close()
    writer.write_step(2, 11, 6, "FB")
    journal = read_journal(path)
    times = [entry.time_ns for entry in journal.entries]
    assert sorted(times) == times
    return [journal.num_lost, *((entry.index, entry.kind, entry.values) for entry in journal.entries)]


def test_compiled_steps_read_as_those_of_python(compiled: Any, tmp_path: Path) -> None:
    """With their numbers in order among other entries, until the journal is closed."""
    python, other = (JournalWriter(tmp_path / name, rank=0) for name in ("python", "compiled"))
    other.use_compiled(compiled)
    assert write_steps(python, tmp_path / "python") == write_steps(other, tmp_path / "compiled")


def test_compiled_steps_are_not_written_by_a_fork(compiled: Any, tmp_path: Path) -> None:
    """A forked copy's steps are not in the journal."""
    writer = JournalWriter(tmp_path / "journal", rank=0)
    writer.use_compiled(compiled)
    writer.write_step(1, 1, 1, "FB")
    child = os.fork()
    if not child:
        writer.write_step(1, 2, 2, "FB")
        os._exit(0)
    os.waitpid(child, 0)
    assert [entry.values["step"] for entry in read_journal(tmp_path / "journal").entries] == [1]
