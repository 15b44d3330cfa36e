# SPDX-License-Identifier: Apache-2.0
"""Try options between runs of the script as it is, until each is decided, then the best ones together. No torch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy

from ddpilot.profiler.phases import Phases
from ddpilot.profiler.rank.overrides import Trial
from ddpilot.profiler.tuning.options import Option, make_trial

LEAST_GAIN = 0.03
"""Gains below this are not looked for."""
MIN_PAIRS = 2
MIN_FINAL_PAIRS = 3
"""For the gain that is printed in the end, whose interval is far narrower than that of two."""
_MIN_NOISE = 0.002
"""Relative standard deviation of a pair that is assumed at least: two pairs may be alike by chance."""
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Factors of Student's distribution for an interval of 95 %, by degrees of freedom from 1 on."""
_NORMAL = 2.0
"""For more degrees of freedom: larger than those."""

Verdict = Literal["helps", "no gain", "slower", "open"]


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How many times as fast an option is: the mean of pairs, and the interval in which the true gain is by 95 %."""

    factor: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        pairs = f"{self.num_pairs} pair{'s' * (self.num_pairs > 1)}"
        if math.isinf(self.high):
            return f"{self.factor:.2f}x, {pairs}"
        return f"{self.factor:.2f}x ({self.low:.2f} to {self.high:.2f}), {pairs}"


def estimate_gain(ratios: Sequence[float]) -> Gain:
    """Return the gain of one or more pairs. `ratios`: duration without the option, divided by that with it."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, freedom = statistics.fmean(logs), len(logs) - 1
    if not freedom:
        return Gain(factor=math.exp(mean), low=0.0, high=math.inf, num_pairs=1)
    noise = max(statistics.stdev(logs), _MIN_NOISE) / math.sqrt(len(logs))
    half = noise * (_STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL)
    low, high = (math.exp(max(min(mean + sign * half, 50.0), -50.0)) for sign in (-1, 1))
    return Gain(factor=math.exp(mean), low=low, high=high, num_pairs=len(logs))


def decide(ratios: Sequence[float], min_pairs: int = MIN_PAIRS) -> Verdict:
    """Return the verdict from the pairs; "open" if more of them are needed, as they are below `min_pairs`."""
    if len(ratios) < min_pairs:
        return "open"
    gain = estimate_gain(ratios)
    if gain.low > 1.0 and gain.factor >= 1.0 + LEAST_GAIN:
        return "helps"
    if gain.high < 1.0:
        return "slower"
    return "no gain" if gain.high < 1.0 + LEAST_GAIN else "open"


_LEAST_BLOCK = 8
_FAR = 1.3
"""How many times as fast one value has to be for another one not to be tried again. Runs differ by less than that."""
_SHARE_FOR_TRIALS = 0.75
"""Of the time, for trying options one by one; the rest is for the best ones together."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the script."""

    update_s: float
    """Duration of an update; NaN if the run failed."""
    wall_s: float
    """Duration of the run, with the start of its ranks."""
    error: str = ""
    """Why it failed."""


@dataclass(kw_only=True)
class Tried:
    """The trials of one option, or of several together."""

    options: tuple[Option, ...]
    ratios: list[float] = field(default_factory=list)
    """By pair: duration of an update without, divided by that with."""
    durations_s: list[float] = field(default_factory=list)
    """By pair: duration of an update with."""
    error: str = ""
    """Why it does not work; "" if it works."""
    min_pairs: int = MIN_PAIRS
    """Minimum number of pairs for a verdict."""

    @property
    def verdict(self) -> Verdict:
        """The verdict from the pairs so far."""
        return "open" if self.error else decide(self.ratios, self.min_pairs)

    @property
    def gain(self) -> Gain | None:
        """The gain of the pairs so far; None without any."""
        return estimate_gain(self.ratios) if self.ratios else None

    @property
    def is_open(self) -> bool:
        """True if more pairs are needed."""
        return not self.error and self.verdict == "open"

    def __str__(self) -> str:
        return ", ".join(map(str, self.options))


@dataclass(kw_only=True)
class Trials:
    """Everything that was tried."""

    tried: list[Tried]
    """One for each option, in the order in which they were given."""
    together: list[Tried] = field(default_factory=list)
    """In new pairs, the best option alone, and the best values of all options together if there are several."""
    durations_s: list[float] = field(default_factory=list)
    """Durations of an update of the script as it is."""
    num_runs: int = 0
    ended: str = ""
    """Why the trials ended early; "" if they did not."""

    @property
    def winner(self) -> Tried | None:
        """The options that helped in trials and again in new pairs. None if none did.

        More options than one only if they are better than the best one alone.
        """
        helps = [each for each in self.together if each.verdict == "helps"]
        return take_first(helps) if helps else None


class Search:
    """Runs trials by `run`, which raises KeyboardInterrupt to end them and returns errors of the script in its result.

    `rounds`: the most pairs of an option. `limit_s`: no run begins that would probably end later. `show`: called with a
    line for each run.
    """

    def __init__(
        self,
        run: Callable[[Trial], Run],
        options: Sequence[Option],
        *,
        num_updates: int,
        rounds: int,
        limit_s: float,
        show: Callable[[str], None],
    ) -> None:
        self._run_trial = run
        self._num_updates = num_updates
        self._rounds = rounds
        self._end_s = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._show = show
        self._longest_s = 0.0
        self.trials = Trials(tried=[Tried(options=(option,)) for option in options])

    def search(self) -> Trials:
        """Make all trials and return them; those that are known if it is interrupted or the time is over."""
        try:
            self._try_each()
            self._try_together()
        except KeyboardInterrupt:
            self.trials.ended = "interrupted"
        except _ScriptFailedError as error:
            self.trials.ended = str(error)
        return self.trials

    def _try_each(self) -> None:
        tried = self.trials.tried
        end_s = self._end_s - (1 - _SHARE_FOR_TRIALS) * self._limit_s
        for round_ in range(self._rounds):
            wanted = [one for one in tried if one.is_open and not any(is_beaten(one, each) for each in tried)]
            if not self._try_round(wanted if round_ % 2 == 0 else wanted[::-1], end_s):
                self.trials.ended = "the time of --max-minutes was over"
                return

    def _try_together(self) -> None:
        """Try the best values of all options that help together, and the best one alone, which may be better."""
        best = find_best(self.trials.tried)
        if not best:
            return
        chosen = [best[:1], best] if len(best) > 1 else [best]
        finals = self.trials.together
        for each in chosen:
            options = tuple(option for one in each for option in one.options)
            finals.append(Tried(options=options, min_pairs=MIN_FINAL_PAIRS))
        for _ in range(max(self._rounds, MIN_FINAL_PAIRS)):
            wanted = [one for one in finals if one.is_open and not any(is_beaten(one, each) for each in finals)]
            if not self._try_round(wanted, self._end_s):
                self.trials.ended = "the time of --max-minutes was over"
                return

    def _try_round(self, wanted: Sequence[Tried], end_s: float) -> bool:
        """Run each of `wanted` between two runs of the script as it is. Returns False if there is no time for it."""
        before_s = math.nan
        for each in wanted:
            num_more = 2 + math.isnan(before_s)
            if time.monotonic() + num_more * self._longest_s > end_s:
                return False
            if math.isnan(before_s):
                before_s = self._run_base()
            run = self._run(make_trial(each.options, self._num_updates), str(each))
            if run.error:
                each.error = run.error
                self._show(f"  does not work with this script: {run.error}")
                continue
            after_s = self._run_base()
            each.durations_s.append(run.update_s)
            each.ratios.append(math.sqrt(before_s * after_s) / run.update_s)
            self._show(f"  {each}: {each.gain}")
            before_s = after_s
        return True

    def _run_base(self) -> float:
        run = self._run(Trial(num_updates=self._num_updates), "as it is")
        if run.error:
            raise _ScriptFailedError(f"the script as it is failed: {run.error}")
        self.trials.durations_s.append(run.update_s)
        return run.update_s

    def _run(self, trial: Trial, name: str) -> Run:
        run = self._run_trial(trial)
        self.trials.num_runs += 1
        self._longest_s = max(self._longest_s, run.wall_s)
        if not run.error:
            self._show(f"run {self.trials.num_runs}: {name}: {run.update_s * 1e3:.3g} ms an update")
        return run


class _ScriptFailedError(Exception):
    """The script as it is cannot be run any more."""


def is_beaten(one: Tried, other: Tried) -> bool:
    """True if `other`, a different value of the same option, is surely better: by its interval, or by far in a pair."""
    if one.gain is None or other.gain is None or _group(other.options[0]) != _group(one.options[0]):
        return False
    is_surely = other.verdict == "helps" and other.gain.low > one.gain.high
    return is_surely or (other.verdict != "no gain" and other.gain.factor > _FAR * one.gain.factor)


def find_best(tried: Sequence[Tried]) -> list[Tried]:
    """Return the best value of each option that helps, the largest gain first.

    Of values that are equally good, within what is looked for, the first one is taken: the smallest.
    """
    by_name: dict[str, list[Tried]] = {}
    for each in tried:
        if each.verdict == "helps":
            by_name.setdefault(_group(each.options[0]), []).append(each)
    best = []
    for group in by_name.values():
        best.append(take_first(group))
    return sorted(best, key=_factor, reverse=True)


def take_first(tried: Sequence[Tried]) -> Tried:
    """Return the first one that is as good as the best one, within what is looked for."""
    most = max(map(_factor, tried))
    return next(each for each in tried if _factor(each) * (1 + LEAST_GAIN) >= most)


def _group(option: Option) -> str:
    """Return what options that are not tried together have in common."""
    return "unused parameters" if option.name in ("find_unused_parameters", "static_graph") else option.name


def _factor(tried: Tried) -> float:
    return tried.gain.factor if tried.gain is not None else 0.0


def measure_update(phases: Phases, num_passes: int) -> float:
    """Return the duration of an update: the median of the means of blocks of updates.

    A mean, since workers deliver batches in bunches; a median, since other programs disturb some updates. If the loader
    was read several times (`num_passes`), a block has as many updates as an epoch, so that each begins one.
    """
    durations = phases.durations_s.mean(axis=0)
    length = max(_LEAST_BLOCK, len(durations) // num_passes if num_passes > 1 else 0)
    num_blocks = max(1, len(durations) // length)
    return float(numpy.median([block.mean() for block in numpy.array_split(durations, num_blocks)]))
