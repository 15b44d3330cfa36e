# SPDX-License-Identifier: Apache-2.0
"""Learning rates for another batch size."""

from __future__ import annotations

from typing import Any

import pytest

from ddpilot.errors import LoopError
from ddpilot.training.scaling import scale_lr


def test_scale_lr_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    """Aloud, with the rule and where it is from: nobody is to find a learning rate that they did not set."""
    assert scale_lr(0.1, 2048, 256) == pytest.approx(0.8)
    assert capsys.readouterr().out == (
        "learning rate 0.1 for batches of 256 becomes 0.8 for 2,048 "
        "(the linear rule of Goyal et al. 2017, for SGD; warm up over the first epochs)\n"
    )
    said: list[str] = []
    assert scale_lr(1e-3, 64, 256, "sqrt", say=said.append) == pytest.approx(5e-4)
    assert "becomes 0.0005 for 64 (the square-root rule of Krizhevsky 2014" in said[0]


def test_scale_lr_is_silent_on_other_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The value is the same on every rank, the sentence comes from rank 0."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in {**variables, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert scale_lr(0.1, 512, 256) == pytest.approx(0.2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((0.1, 0, 256), "batch sizes of 0 and 256"),
        ((-1.0, 1, 256), "`lr` is -1.0"),
        ((float("inf"), 1, 256), "`lr` is inf"),
        ((0.1, 1, 2, "cubic"), "`rule` is 'cubic'. Use 'linear' or 'sqrt'"),
    ],
)
def test_scale_lr_refuses_what_makes_no_sense(arguments: Any, found: str) -> None:
    """With the value."""
    with pytest.raises(LoopError, match=found):
        scale_lr(*arguments)
