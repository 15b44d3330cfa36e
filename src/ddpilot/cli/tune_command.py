# SPDX-License-Identifier: Apache-2.0
"""``ddpilot tune``: profile a script, try on it what the profile says could help, and print what does."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpilot.environments.private_files import scratch_folder
from ddpilot.errors import DdpilotError, LaunchError, RankError, WatchError
from ddpilot.launching.elastic.rank_main import ScriptCall
from ddpilot.launching.elastic.rendezvous.network import find_gloo_interfaces
from ddpilot.launching.elastic.target import check_target
from ddpilot.module_names import PROFILE_HOOK, TRIAL_HOOK
from ddpilot.profiler.rank.overrides import TRIAL_VARIABLE, Call, Trial, read_calls
from ddpilot.profiler.result import Profile, make_profile
from ddpilot.profiler.spans_file import PROFILE_VARIABLE, RankTimes, find_ranks, read_times
from ddpilot.profiler.tuning.choice import Profiled, choose_options, describe_unknown, find_library, read_names
from ddpilot.profiler.tuning.lines import write_changes
from ddpilot.profiler.tuning.result import Tuning
from ddpilot.profiler.tuning.search import Run, Search, Trials, measure_update
from ddpilot.repeated_runs import RepeatedLauncher

INTERRUPTED = 130
_LEAST_UPDATES = 12
_TIMES_AS_LONG = 5
"""A trial is ended after this many times the duration of the first run, and `_MORE_S`."""
_MORE_S = 30.0
_MAX_ERROR_CHARS = 300


def run_tune(
    script: str,
    args: Sequence[str],
    *,
    nproc_per_node: str,
    rounds: int,
    updates: int,
    max_minutes: float,
    compression: bool,
    as_json: bool,
) -> int:
    """Tune `script` with `args` and print the result. Returns the exit status: 0, or 130 after Ctrl-C.

    `rounds`: the most pairs of runs of an option; `updates`: of each run. A line to stderr says what runs. Raises as
    `run_profile` if the script fails as it is, and LaunchError for too few updates.
    """
    if updates < _LEAST_UPDATES:
        fix = f"Give {_LEAST_UPDATES} or more: the first ones are left out"
        raise LaunchError("reading --updates", found=str(updates), fix=fix)
    found = tune_script(
        script,
        args,
        nproc_per_node=nproc_per_node,
        rounds=rounds,
        num_updates=updates,
        limit_s=60 * max_minutes,
        compression=compression,
    )
    print(json.dumps(found.to_dict()) if as_json else f"\n{found.render()}", flush=True)
    return INTERRUPTED if found.trials.ended == "interrupted" else 0


def tune_script(
    script: str,
    args: Sequence[str],
    *,
    nproc_per_node: str,
    rounds: int,
    num_updates: int,
    limit_s: float,
    compression: bool = False,
) -> Tuning:
    """Return what makes `script` faster; see `run_tune`."""
    began_s = time.monotonic()
    nproc = int(nproc_per_node) if nproc_per_node.isdecimal() else nproc_per_node
    check_target("script", script)
    runner = Runner(script, args, nproc)
    _show(f"profile of up to {num_updates} updates")
    try:
        profile, times, calls = runner.profile(Trial(num_updates=num_updates))
    except RankError as error:
        _show(error.rank_traceback.rstrip())
        raise
    runner.limit_s = _TIMES_AS_LONG * (time.monotonic() - began_s) + _MORE_S
    library = find_library() if _uses_nccl(times[0]) else None
    names = read_names(library) if library is not None else frozenset()
    choice = choose_options(_collect_facts(profile, times[0], calls, names), compression=compression)
    for option in choice.options:
        _show(f"to try: {option} ({option.why})")
    limits: dict[str, Any] = {"rounds": rounds, "limit_s": limit_s - (time.monotonic() - began_s)}
    trials = Trials(tried=[])
    if choice.options:
        trials = Search(runner.run, choice.options, num_updates=num_updates, show=_show, **limits).search()
    num_ranks = len(profile.phases.ranks)
    words = " ".join((script, *(["--", *args] if args else [])))
    return Tuning(
        title=Path(script).name,
        num_ranks=num_ranks,
        num_updates=num_updates,
        trials=trials,
        changes=tuple(
            write_changes(trials.winner.options, f"ddpilot run -n {num_ranks} {words}") if trials.winner else ()
        ),
        advice=choice.advice,
        environment=tuple(describe_unknown(names, os.environ)) if library is not None else (),
        estimates={each.finding.code: each.factor for each in profile.judged},
        wall_s=time.monotonic() - began_s,
    )


def _collect_facts(profile: Profile, times: RankTimes, calls: list[Call], nccl_names: frozenset[str]) -> Profiled:
    """Return what the choice of options depends on; `times` and `calls`: those of rank 0."""
    return Profiled(
        phases=profile.phases,
        facts=times.facts,
        calls=calls,
        nccl_names=nccl_names,
        environ=dict(os.environ),
        judged=profile.judged,
        interfaces=find_gloo_interfaces(os.environ),
    )


class Runner:
    """Runs `script` again and again; a run is ended after `limit_s`."""

    def __init__(self, script: str, args: Sequence[str], nproc_per_node: int | str) -> None:
        self._script = script
        self._args = tuple(args)
        self._nproc_per_node = nproc_per_node
        self.limit_s: float | None = None

    def profile(self, trial: Trial) -> tuple[Profile, list[RankTimes], list[Call]]:
        """Run the script with `trial`; returns its profile, what ranks have recorded, and the calls of rank 0.

        Raises KeyboardInterrupt after Ctrl-C, and the error of a script that fails.
        """
        with scratch_folder("ddpilot-tune-") as folder:
            trial.write(folder)
            launcher = RepeatedLauncher(
                nproc_per_node=self._nproc_per_node,
                hooks=(TRIAL_HOOK, PROFILE_HOOK),
                run_limit_s=self.limit_s,
                on_finding="stop",
                env={**trial.environ, PROFILE_VARIABLE: str(folder), TRIAL_VARIABLE: str(folder)},
            )
            launcher.run(ScriptCall(Path(self._script).name, "script", self._script, self._args))
            times = [read_times(folder, rank) for rank in find_ranks(folder)]
            return make_profile(times), times, read_calls(folder)

    def run(self, trial: Trial) -> Run:
        """Run the script with `trial`; an error of the script is in the result."""
        began_s = time.monotonic()
        try:
            profile, _, calls = self.profile(trial)
        except DdpilotError as error:
            return Run(update_s=float("nan"), wall_s=time.monotonic() - began_s, error=_describe(error))
        num_passes = max((call.num_passes for call in calls), default=0)
        return Run(update_s=measure_update(profile.phases, num_passes), wall_s=time.monotonic() - began_s)


def _uses_nccl(times: RankTimes) -> bool:
    """True if the script exchanges gradients by NCCL, or if a variable of NCCL is set."""
    ddp = times.facts.get("ddp") or {}
    return ddp.get("backend") == "nccl" or any(name.startswith("NCCL_") for name in os.environ)


def _describe(error: DdpilotError) -> str:
    """Return the error on one line."""
    findings = [each.summary for each in getattr(error, "findings", ()) if each.severity == "error"]
    text = " ".join((findings[0] if isinstance(error, WatchError) and findings else error.found).split())
    return text if len(text) <= _MAX_ERROR_CHARS else text[: _MAX_ERROR_CHARS - 3] + "..."


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
