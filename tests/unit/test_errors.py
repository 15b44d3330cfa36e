# SPDX-License-Identifier: Apache-2.0
"""What a notebook and a rank show of an exception of ddpilot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from ddpilot.errors import (
    MISSPELT,
    DataError,
    DdpilotError,
    GroupError,
    LaunchError,
    LoopError,
    WatchError,
    did_you_mean,
)
from ddpilot.launching.exception_report import user_traceback
from tests.unit.magics.samples import ipython_shell

DID, FOUND = "starting a fit", "`epochs` is -1"
CELL = "def fit():\n    calls(error)\n\nfit()"
THEIRS = """
def calls(error):
    try:
        raise KeyError("an internal one")
    except KeyError as cause:
        raise error from cause
"""


def calls_of_library() -> dict[str, Any]:
    """A function of a library that raises its argument from a KeyError of its own."""
    names: dict[str, Any] = {}
    exec(compile(THEIRS, "/usr/lib/python3/dist-packages/torch/nn/functional.py", "exec"), names)
    return names


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A shell that is the process's own."""
    with ipython_shell() as shell:
        monkeypatch.setattr("IPython.get_ipython", lambda: shell)
        yield shell


@pytest.mark.parametrize("kind", [DataError, GroupError, LoopError])
def test_a_notebook_shows_the_users_lines_and_the_message(shell: Any, kind: type[DdpilotError]) -> None:
    """Nothing of torch and ddpilot, and no cause that is theirs; the error is as before afterwards."""
    error = kind(DID, found=FOUND)
    shell.user_ns.update(calls_of_library(), error=error)
    shell.run_cell(CELL)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error._render_traceback_()))
    assert "calls(error)" in shown
    assert "fit()" in shown
    assert shown.endswith(f"{kind.__name__}: starting a fit: `epochs` is -1")
    assert "functional.py" not in shown
    assert "KeyError" not in shown
    assert isinstance(error.__cause__, KeyError)


def test_a_rank_shows_the_users_lines_and_the_message() -> None:
    """Of a launch, in the same way."""
    error = LoopError(DID, found=FOUND)
    with pytest.raises(LoopError):
        calls_of_library()["calls"](error)
    shown = user_traceback(error)
    assert "test_a_rank_shows" in shown
    assert "functional.py" not in shown
    assert "KeyError" not in shown


def test_a_cause_with_lines_of_the_users_is_shown() -> None:
    """Such as an error of a dataset."""
    error = LoopError(DID, found=FOUND)
    with pytest.raises(KeyError) as cause:
        raise KeyError("the user's")
    error.__cause__ = cause.value
    with pytest.raises(LoopError):
        raise error
    assert "the user's" in user_traceback(error)


def test_an_error_of_a_magic_is_its_message(shell: Any) -> None:
    """The line of the cell is the magic itself."""
    error = LoopError(DID, found=FOUND)
    library = {"error": error, **calls_of_library()}
    exec(compile("def fails(line):\n    calls(error)", "/usr/lib/python3/dist-packages/torch/a.py", "exec"), library)
    shell.register_magic_function(library["fails"], magic_name="fails")
    shell.run_cell("%fails")
    assert error.__traceback__ is not None
    assert error._render_traceback_() == ["LoopError: starting a fit: `epochs` is -1"]


@pytest.mark.parametrize("kind", [LaunchError, WatchError])
def test_an_error_of_a_launch_is_its_message(shell: Any, kind: type[LaunchError]) -> None:
    """Its report is what is to be read."""
    error = kind(DID, found=FOUND)
    shell.user_ns.update(calls_of_library(), error=error)
    shell.run_cell(CELL)
    assert error._render_traceback_() == [f"{kind.__name__}: starting a fit: `epochs` is -1"]


def test_did_you_mean_names_the_nearest() -> None:
    """As code by default; nothing where nothing is near."""
    assert did_you_mean("strat", ["start", "stop"]) == "Did you mean `start`?"
    assert did_you_mean("strat", ["start", "stop"], show="--{}".format) == "Did you mean --start?"
    assert did_you_mean("losses", ["loss", "x", "losse"], num=3) == "Did you mean `losse` or `loss`?"
    assert did_you_mean("xyz", ["start", "stop"]) == ""
    assert did_you_mean("starting", ["start"], cutoff=0.9) == ""
    for name in ("tiem", "tme", "timee", "tome"):  # one slip, whatever the cutoff
        assert did_you_mean(name, ["time", "nodes"], cutoff=0.9) == "Did you mean `time`?"
    assert did_you_mean("batch_size", ["batch_split", "global_batch_size"]) == "Did you mean `global_batch_size`?"
    assert did_you_mean("--log", ["--lag-s", "--log-folder"]) == "Did you mean `--log-folder`?"  # as begun
    assert did_you_mean("--mem", ["--mem-per-gpu"], cutoff=MISSPELT) == ""  # an option of sbatch
