# SPDX-License-Identifier: Apache-2.0
"""Programs of the zoo with their tensors on the emulated accelerator, whose collectives return at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.zoo import watched
from tests.zoo.watched import judge, read_case, run_case, run_watched

ZOO = Path(watched.__file__).parent
HERE = Path(__file__).parent / "programs"
NUM_AT_ONCE = 2


def judge_all(cases: Sequence[str], controls: Sequence[str], num_ranks: int = 2) -> dict[str, list[str]]:
    """By program, empty where all is well: what is not named of `cases` as the script asks for; what is found, or
    raised, in the right programs `controls`."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        named = pool.map(lambda name: _judge_case(name, num_ranks), cases)
        return dict(zip((*cases, *controls), (*named, *pool.map(_find_in_control, controls)), strict=True))


def _judge_case(name: str, num_ranks: int) -> list[str]:
    case = read_case(_find(name, "cases"))
    return list(judge(case, run_case(case, on_device=True, num_ranks=num_ranks)))


def _find_in_control(name: str) -> list[str]:
    run = run_watched(_find(name, "controls"), 90.0, on_device=True)
    return [f"{each.code}: {each.summary}" for each in run.findings] + ([repr(run.error)] if run.error else [])


def _find(name: str, folder: str) -> Path:
    own = HERE / f"{name}.py"
    return own if own.exists() else ZOO / folder / f"{name}.py"
