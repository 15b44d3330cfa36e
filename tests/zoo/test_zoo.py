# SPDX-License-Identifier: Apache-2.0
"""Every program of the zoo fails without ddpilot as its users saw it, and is named with it; right ones stay silent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch  # noqa: F401 - threads that import it at the same time would see half of it

from tests.soak import IS_SOAK, soak
from tests.zoo.plain import PlainRunner
from tests.zoo.watched import judge, read_case, read_cases, run_case, run_watched

HERE = Path(__file__).parent
CASES = read_cases(HERE / "cases")
CONTROLS = read_cases(HERE / "controls")[1::6] if not IS_SOAK else read_cases(HERE / "controls")
NUM_AT_ONCE = 8
NUM_LAUNCHES = 3


@pytest.mark.timeout(180)
@soak
def test_without_ddpilot_every_case_fails_as_its_users_saw_it() -> None:
    """A hang that is cut after ten seconds, an abort, an error, a number that is silently wrong."""
    with PlainRunner() as runner, ThreadPoolExecutor(NUM_AT_ONCE) as pool:  # a hang computes nothing
        ends = dict(zip(CASES, pool.map(runner.run, CASES), strict=True))
    wrong = [
        f"{path.stem}: {end.kind_of_failure} instead of {read_case(path).without}, ranks {end.ends}\n"
        + "\n".join(output[-1000:] for output in end.outputs)
        for path, end in ends.items()
        if end.kind_of_failure not in read_case(path).without
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(300)
def test_with_ddpilot_every_case_is_named() -> None:
    """Code, rank and line of the finding are those that the case says."""
    with ThreadPoolExecutor(NUM_LAUNCHES) as pool:
        runs = dict(zip(CASES, pool.map(run_case, map(read_case, CASES)), strict=True))
    wrong = {path.stem: (list(judge(read_case(path), run)), run) for path, run in runs.items()}
    assert not {name: found for name, found in wrong.items() if found[0]}


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_right_programs_have_no_finding() -> None:
    """They run to their end, and nothing is said of them."""
    with ThreadPoolExecutor(NUM_LAUNCHES) as pool:  # some of them sleep
        runs = dict(zip(CONTROLS, pool.map(lambda path: run_watched(path, limit_s=90), CONTROLS), strict=True))
    assert not {path.stem: run for path, run in runs.items() if run.error is not None or run.findings}
