# SPDX-License-Identifier: Apache-2.0
"""Trials of a script that is only a function: what is tried how often, and what is said of it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable

import numpy
import pytest

from ddpilot.profiler.phases import Phases
from ddpilot.profiler.rank.overrides import Trial
from ddpilot.profiler.tuning.lines import write_changes
from ddpilot.profiler.tuning.options import Option
from ddpilot.profiler.tuning.result import Tuning
from ddpilot.profiler.tuning.search import Run, Search, Trials, Verdict, decide, estimate_gain, measure_update


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([2.0], "open"),
        ([2.0, 2.05], "helps"),
        ([1.2, 2.4], "open"),
        ([1.00, 1.002, 0.999, 1.001], "no gain"),
        ([1.015, 1.016, 1.015], "no gain"),
        ([0.80, 0.81, 0.80], "slower"),
        ([1.10, 0.95, 1.20, 0.99], "open"),
    ],
)
def test_decide_when_pairs_agree_or_not(ratios: list[float], verdict: Verdict) -> None:
    """Large gains need two pairs; a gain that is surely small is none; pairs that differ leave it open."""
    assert decide(ratios) == verdict


def test_estimate_gain_of_one_pair_has_no_interval() -> None:
    """Its text says nothing of one."""
    assert str(estimate_gain([1.5])) == "1.50x, 1 pair"
    assert str(estimate_gain([1.5, 1.5, 1.5])) == "1.50x (1.49 to 1.51), 3 pairs"


def test_gains_are_rarely_claimed_of_noise() -> None:
    """Of options without an effect, in runs that differ by 5 %, few help in trials and almost none again."""
    random.seed(0)

    def try_once() -> bool:
        ratios: list[float] = []
        while len(ratios) < 5 and decide(ratios) == "open":
            ratios.append(random.lognormvariate(0, 0.05))
        return decide(ratios) == "helps"

    claimed = [try_once() for _ in range(2000)]
    assert sum(claimed) / 2000 < 0.08
    again = [try_once() and try_once() for _ in range(2000)]
    assert sum(again) / 2000 < 0.01


NOISE = (1.0, 1.01, 0.99, 1.005, 0.995)
"""Factors of successive runs."""
WORKERS = [Option(kind="loader", name="num_workers", value=value, why="", warning="may change") for value in (1, 2, 4)]
BUCKET = Option(kind="ddp", name="bucket_cap_mb", value=50, why="")
GRAPH = Option(kind="ddp", name="static_graph", value=True, why="")


def run_script(trial: Trial) -> float:
    """Duration of an update: workers help up to 2; a static graph is an error."""
    if trial.ddp.get("static_graph"):
        raise ValueError("the graph is not static")
    return {0: 0.030, 1: 0.025, 2: 0.015, 4: 0.015}[trial.loader.get("num_workers", 0)]


def search(
    options: list[Option], update_s: Callable[[Trial], float] = run_script, *, rounds: int = 5, limit_s: float = 1e6
) -> tuple[Trials, list[str]]:
    """The trials, and the runs in order."""
    runs: list[str] = []
    noise = itertools.cycle(NOISE)

    def run(trial: Trial) -> Run:
        runs.append(", ".join(f"{name}={value}" for name, value in {**trial.ddp, **trial.loader}.items()) or "-")
        try:
            return Run(update_s=update_s(trial) * next(noise), wall_s=1.0)
        except ValueError as error:
            return Run(update_s=float("nan"), wall_s=1.0, error=str(error))

    shown: list[str] = []
    made = Search(run, options, num_updates=40, rounds=rounds, limit_s=limit_s, show=shown.append)
    return made.search(), runs


def describe(trials: Trials) -> Tuning:
    """The result with these trials."""
    return Tuning(
        title="train.py",
        num_ranks=2,
        num_updates=40,
        trials=trials,
        changes=tuple(write_changes(trials.winner.options, "ddpilot run train.py")) if trials.winner else (),
        advice=("accumulate",),
        environment=(),
        estimates={"DDP721": 2.0},
        wall_s=60.0,
    )


def test_the_best_values_are_tried_together_and_again() -> None:
    """Each run of an option is between two runs as it is; the fewest workers that are as good win."""
    trials, runs = search([*WORKERS, BUCKET, GRAPH])
    assert runs[:7] == ["-", "num_workers=1", "-", "num_workers=2", "-", "num_workers=4", "-"]
    assert all("-" in pair for pair in itertools.pairwise(runs) if pair != ("static_graph=True", "-"))
    assert trials.winner is not None
    assert [str(option) for option in trials.winner.options] == ["num_workers=2"]
    assert [each.verdict for each in trials.tried[1:4]] == ["helps", "helps", "no gain"]
    assert trials.tried[4].error == "the graph is not static"
    text = describe(trials).render(width=100)
    assert "num_workers=1      1.18x, 1 pair" in text
    assert "less than num_workers=4" in text
    assert "no gain of 3%" in text
    assert "does not work with this script: the graph is not static" in " ".join(text.split())
    assert "3 pairs of their own, 30 -> 15" in text
    assert "note: num_workers=2 may change" in text
    assert json.loads(json.dumps(describe(trials).to_dict()))["helps"] == ["num_workers=2"]


def test_nothing_helps_is_said() -> None:
    """After trials without a gain; and if there was nothing to try."""
    trials, _ = search([BUCKET])
    assert trials.winner is None
    assert "Nothing helps: none of the 1 options gives 3% or more for sure." in str(describe(trials))
    assert "Nothing helps: the profile shows nothing" in str(describe(Trials(tried=[])))


def test_a_gain_that_is_not_seen_again_is_not_claimed() -> None:
    """The option is faster in its first runs only."""
    count = itertools.count()

    def luck(trial: Trial) -> float:
        return 0.015 if trial.ddp and next(count) < 2 else 0.030

    trials, _ = search([BUCKET], luck)
    assert trials.tried[0].verdict == "helps"
    assert trials.winner is None
    assert "Nothing helps for sure: bucket_cap_mb=50 helped in trials, and was 1.00x" in str(describe(trials))
    assert describe(trials).gain is None


def test_options_that_do_not_go_together_are_tried_alone() -> None:
    """The best one remains."""

    def clash(trial: Trial) -> float:
        if trial.ddp and trial.loader:
            raise ValueError("both")
        return 0.015 if trial.loader else 0.020 if trial.ddp else 0.030

    trials, _ = search([BUCKET, WORKERS[2]], clash)
    assert trials.together[1].error == "both"
    assert trials.winner is not None
    assert str(trials.winner) == "num_workers=4"


def test_options_that_are_in_each_others_way_are_not_combined() -> None:
    """Each helps alone; together they are no better than without."""

    def interfere(trial: Trial) -> float:
        return 0.030 if bool(trial.ddp) == bool(trial.loader) else 0.015 if trial.loader else 0.020

    trials, runs = search([BUCKET, WORKERS[2]], interfere)
    assert [str(each) for each in trials.together] == ["num_workers=4", "num_workers=4, bucket_cap_mb=50"]
    assert runs.count("bucket_cap_mb=50, num_workers=4") == 1
    assert trials.winner is trials.together[0]


def test_options_that_add_up_are_combined() -> None:
    """Together they are better than the best one alone."""

    def add(trial: Trial) -> float:
        return 0.030 - 0.010 * bool(trial.ddp) - 0.012 * bool(trial.loader)

    trials, _ = search([BUCKET, WORKERS[2]], add)
    assert str(trials.winner) == "num_workers=4, bucket_cap_mb=50"


def test_what_is_known_is_returned_if_it_is_interrupted() -> None:
    """Ctrl-C in a run ends the trials."""
    count = itertools.count()

    def interrupt(trial: Trial) -> float:
        if next(count) == 5:
            raise KeyboardInterrupt
        return run_script(trial)

    trials, runs = search(WORKERS, interrupt)
    assert (trials.ended, len(runs)) == ("interrupted", 6)
    assert "Nothing has helped so far. The trials ended early: interrupted." in str(describe(trials))


def test_time_and_a_script_that_fails_end_the_trials() -> None:
    """No run begins that would end too late."""
    trials, runs = search([BUCKET], limit_s=0.5)
    assert trials.ended == "the time of --max-minutes was over" or not runs
    count = itertools.count()

    def fail(trial: Trial) -> float:
        if next(count) == 2:
            raise ValueError("no memory")
        return run_script(trial)

    trials, _ = search([BUCKET], fail)
    assert trials.ended == "the script as it is failed: no memory"


@pytest.mark.parametrize(("num_passes", "expected"), [(1, 1.0), (4, 1.9)])
def test_an_update_is_measured_in_blocks(num_passes: int, expected: float) -> None:
    """A disturbance is left out; the start of an epoch is not, if there are several."""
    durations = numpy.ones((2, 40))
    durations[:, 0::10] += 9.0 * (num_passes > 1)
    durations[:, 20] += 100.0 * (num_passes == 1)
    phases = Phases(
        ranks=(0, 1),
        seconds=durations[:, :, None],
        arrivals_s=numpy.zeros((2, 40)),
        num_samples=numpy.ones((2, 40)),
        first_update=5,
        by_site={},
    )
    assert measure_update(phases, num_passes) == pytest.approx(expected, rel=0.1)
