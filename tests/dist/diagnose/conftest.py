# SPDX-License-Identifier: Apache-2.0
"""What every test of the doctor and of verify needs."""

from __future__ import annotations

import functools

import pytest

from ddpilot import Launcher
from ddpilot.diagnose import doctor
from ddpilot.diagnose.verify import target
from ddpilot.repeated_runs import RepeatedLauncher
from tests.preload import PRELOAD


@pytest.fixture(autouse=True)
def shared_rank_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks come from the rank server of other tests, which has imported what each of them would import: a `verify`
    starts four ranks or more. Those of a command in a process of its own are as users have them.
    """
    monkeypatch.setattr(target, "RepeatedLauncher", functools.partial(RepeatedLauncher, preload=PRELOAD))
    monkeypatch.setattr(doctor, "Launcher", functools.partial(Launcher, preload=PRELOAD))
