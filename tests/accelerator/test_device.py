# SPDX-License-Identifier: Apache-2.0
"""The emulated accelerator itself: see tests/accelerator/claims.py for what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator import why_not
from tests.accelerator.claims import CLAIMS, OWN_PROCESS
from tests.accelerator.on_device import call

LIMIT_S = 240.0
OWN = [claim.__name__ for claim in OWN_PROCESS]
SHARED = [name for name in CLAIMS if name not in OWN]

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built"),
    pytest.mark.timeout(1500),  # the first of a session compiles the device
]


def run(*names: str) -> dict[str, str]:
    """Run the claims in one process that has the device, and return what came of each."""
    outcomes: dict[str, str] = call("tests.accelerator.claims:outcomes_of", *names, limit_s=LIMIT_S)
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What came of the claims that one process runs after each other."""
    return run(*SHARED)


@pytest.mark.parametrize("name", SHARED)
def test_claim(name: str, outcomes: dict[str, str]) -> None:
    """What the device promises holds."""
    assert outcomes[name] == "holds", outcomes[name]


@pytest.mark.parametrize("name", OWN)
def test_claim_in_a_process_of_its_own(name: str) -> None:
    """What the device promises holds where it leaves the process unusable."""
    assert run(name) == {name: "holds"}


def test_without_a_compiler_the_tests_say_why_they_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nothing was built and nothing can be, there is a reason to skip."""
    monkeypatch.setenv("EMU_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    assert why_not.__wrapped__() == "the emulated accelerator needs a C++ compiler"


def test_without_the_environment_there_is_no_device() -> None:
    """The process of the tests, which has not the environment, keeps the CPU alone."""
    import torch

    assert not hasattr(torch, "emu")
