# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of tensors on accelerators: exact copies of the moment, through pinned memory or without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpilot import Launcher
from tests.accelerator import SITE, environment, saving, why_not
from tests.preload import PRELOAD

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
    pytest.mark.timeout(300),
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find the device through this process's `sys.path` and environment."""
    monkeypatch.syspath_prepend(str(SITE))
    for name, value in environment(2).items():
        monkeypatch.setenv(name, value)


def launch(fn: Any, *args: Any) -> Any:
    """What one rank with two devices returned."""
    return Launcher(nproc_per_node=1, timeout_s=200, preload=PRELOAD).run(fn, *args)[0]


def test_copies_from_two_devices_are_exact_through_every_window() -> None:
    """Every layout, in pieces and in one, and where the system locks no memory at all."""
    assert launch(saving.copy_each_layout) == []


def test_a_copy_waits_for_each_device_and_not_for_the_current_one_alone() -> None:
    """A model on two devices is not written before the second one's tensors have arrived, and later changes are not."""
    assert launch(saving.copy_while_devices_are_slow) == (True, 0)


def test_a_save_holds_what_the_device_had_when_training_went_on(tmp_path: Path) -> None:
    """The files are written while the weights change."""
    assert launch(saving.save_and_load, tmp_path)
