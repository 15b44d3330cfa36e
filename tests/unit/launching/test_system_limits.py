# SPDX-License-Identifier: Apache-2.0
"""Errors of the system that are about a limit, and what to do about each."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest

from ddpilot.errors import LaunchError
from ddpilot.launching.system_limits import limits_explained


@pytest.mark.parametrize(
    ("number", "match"),
    [
        (
            errno.EMFILE,
            r"^starting 4 ranks: too many open files: this process may have \d+ open at a time. Raise `ulim",
        ),
        (errno.ENFILE, "whole machine has no file descriptors left"),
        (errno.EFBIG, "File too large. Raise the limit of file sizes: `ulimit -f unlimited`"),
        (errno.ENOSPC, "No space left on device. Free space there"),
        (errno.EAGAIN, "`ulimit -u`, or ask for fewer ranks"),
    ],
)
def test_limits_explained_says_what_to_raise(number: int, match: str) -> None:
    """The limit, its command, and the system's error as the cause."""
    with pytest.raises(LaunchError, match=match) as caught, limits_explained("starting 4 ranks"):
        raise OSError(number, os.strerror(number))
    assert isinstance(caught.value.__cause__, OSError)


def test_limits_explained_names_tmpdir_if_no_directory_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the standard library raises it, not as a file that was not found."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    match = r"No usable temporary directory found in \['/nowhere'\]. Set TMPDIR to"
    with pytest.raises(LaunchError, match=match), limits_explained("starting a session"):
        tempfile.TemporaryFile()


def test_limits_explained_leaves_other_errors_alone() -> None:
    """A missing file of the user's is not about a system limit."""
    with pytest.raises(FileNotFoundError), limits_explained("starting a session"):
        open("/nowhere/at/all")
