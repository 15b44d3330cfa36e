# SPDX-License-Identifier: Apache-2.0
"""What is looked at before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpilot.errors import LaunchError
from ddpilot.launching.elastic.options import RunOptions
from ddpilot.launching.elastic.prepare import prepare_run


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A script that is there."""
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def test_prepare_run_refuses_a_log_dir_that_is_a_file(script: str) -> None:
    """The folder and the system's word."""
    with pytest.raises(LaunchError, match=r"making files in --log-dir .*train.py: FileExistsError: File exists. Give"):
        prepare_run(RunOptions(target=script, log_dir=Path(script)), {})


def test_prepare_run_makes_the_log_dir(script: str, tmp_path: Path) -> None:
    """It is there, and empty, once it has been looked at."""
    prepared = prepare_run(RunOptions(target=script, nproc_per_node=1, log_dir=tmp_path / "a" / "b"), {})
    assert prepared.endpoint is not None
    prepared.endpoint.close()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_prepare_run_says_nothing_before_an_error(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The notice about the missing GPU is not shown if the run does not start."""
    with pytest.raises(LaunchError, match="no address of node 0 is given"):
        prepare_run(RunOptions(target=script, nnodes=(2, 2)), {})
    assert capsys.readouterr().err == ""


def test_prepare_run_refuses_a_filter_for_local_ranks_that_are_not_there(script: str) -> None:
    """Nothing would be shown; local ranks count from 0."""
    with pytest.raises(LaunchError, match="reading --local-ranks-filter: 5, but the node has local ranks 0 to 1. Give"):
        prepare_run(RunOptions(target=script, nproc_per_node=2, shown_local_ranks=frozenset({5})), {})


def test_prepare_run_refuses_a_rendezvous_backend_that_torch_does_not_have(script: str) -> None:
    """Before anything starts, and with the name that was meant."""
    with pytest.raises(LaunchError, match="reading --rdzv-backend: 'c10b'. Did you mean c10d. Backends are static, c1"):
        prepare_run(RunOptions(target=script, nproc_per_node=1, rdzv_backend="c10b"), {})
