# SPDX-License-Identifier: Apache-2.0
"""Building the compiled part of recording: where it goes, and what is said where it cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddpilot.errors import RecordError
from ddpilot.record.collectives import native


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
