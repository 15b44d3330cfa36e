# SPDX-License-Identifier: Apache-2.0
"""Programs of the zoo with their tensors on the emulated accelerator, whose collectives return at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.zoo import watched
from tests.zoo.watched import Case, Watched, judge, read_case, run_case, run_watched

ZOO = Path(watched.__file__).parent
HERE = Path(__file__).parent / "programs"
NUM_AT_ONCE = 2


def judge_cases(names: Sequence[str], num_ranks: int = 2) -> dict[str, list[str]]:
    """Of each of `names`, on `num_ranks` ranks, what is not named as its script asks for; empty where all is."""
    cases = {name: read_case(_find(name, "cases")) for name in names}

    def run(case: Case) -> Watched:
        return run_case(case, on_device=True, num_ranks=num_ranks)

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        runs = dict(zip(cases, pool.map(run, cases.values()), strict=True))
    return {name: list(judge(case, runs[name])) for name, case in cases.items()}


def find_in_controls(names: Sequence[str]) -> dict[str, list[str]]:
    """What is found, or raised, in each of the right programs `names`."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        paths = [_find(name, "controls") for name in names]
        runs = dict(zip(names, pool.map(lambda path: run_watched(path, 90.0, on_device=True), paths), strict=True))
    return {
        name: [f"{each.code}: {each.summary}" for each in run.findings] + ([repr(run.error)] if run.error else [])
        for name, run in runs.items()
    }


def _find(name: str, folder: str) -> Path:
    own = HERE / f"{name}.py"
    return own if own.exists() else ZOO / folder / f"{name}.py"
