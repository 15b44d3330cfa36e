# SPDX-License-Identifier: Apache-2.0
"""examples/digits_trainer.py learns, and prints the same if it starts ranks and if it runs on them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpilot.module_names import TRAINER_PRELOAD
from ddpilot.trainer import ranks
from examples import digits_trainer
from tests.dist.trainer.bodies import launcher
from tests.preload import SKLEARN, WITH_SKLEARN

PRELOAD = (*TRAINER_PRELOAD, *SKLEARN)


@pytest.mark.timeout(120)
def test_digits_are_trained_equally_from_a_script_and_on_ranks(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 93 of 100 after two epochs on two ranks; the very same where these are there already."""
    monkeypatch.setattr(ranks, "TRAINER_PRELOAD", PRELOAD)
    for name, value in WITH_SKLEARN.items():
        monkeypatch.setenv(name, value)
    accuracy = digits_trainer.main(epochs=2, nproc_per_node=2)
    assert accuracy > 0.93
    said = capfd.readouterr().out.splitlines()[-1]
    assert said.startswith(f"test accuracy {accuracy:.1%}; the first ten digits are [5, ")
    assert list(replace(launcher(), nproc_per_node=2, preload=PRELOAD).run(digits_trainer.main, 2, 7)) == [accuracy] * 2
    assert f"[rank 0] {said}" in capfd.readouterr().out.splitlines()
