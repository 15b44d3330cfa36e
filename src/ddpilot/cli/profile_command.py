# SPDX-License-Identifier: Apache-2.0
"""``ddpilot profile`` and ``ddpilot scale``: run a script on ranks and report where the time of its updates goes."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddpilot.environments.private_files import scratch_folder
from ddpilot.errors import LaunchError, RecordError
from ddpilot.launching.elastic.options import RunOptions
from ddpilot.launching.elastic.prepare import prepare_run
from ddpilot.launching.elastic.run import run_prepared
from ddpilot.module_names import PROFILE_HOOK
from ddpilot.output.writer import LabelledWriter
from ddpilot.profiler.result import Profile, read_profile
from ddpilot.profiler.scaling import compare_sizes
from ddpilot.profiler.spans_file import PROFILE_VARIABLE, TRACE_VARIABLE
from ddpilot.profiler.traces import merge_traces
from ddpilot.watch.companion import Watcher
from ddpilot.watch.options import WatchOptions


def run_profile(script: str, args: Sequence[str], *, nproc_per_node: str, html: str, trace: str, as_json: bool) -> int:
    """Run `script` with `args`, and print its profile. Returns the exit status, 0.

    `html`: path of the report to write; `trace`: folder for the traces; "" for none. Raises LaunchError before any rank
    starts, RankError or WatchError if the script fails, and RecordError if it made too few updates.
    """
    _check_folder(html)
    nproc = int(nproc_per_node) if nproc_per_node.isdecimal() else nproc_per_node
    options = RunOptions(target=script, args=tuple(args), nproc_per_node=nproc)
    profile = _profile(options, shows_output=not as_json, trace=trace)
    written = []
    if html:
        profile.to_html(html, title=f"{Path(script).name} on {len(profile.phases.ranks)} ranks")
        written.append(f"report: {html}")
    if trace:
        merged = merge_traces(Path(trace), list(profile.phases.ranks))
        written.append(f"trace: {merged}" if merged else "trace: the script made too few updates for one")
    print(json.dumps(profile.to_dict()) if as_json else f"\n{profile.render(color=sys.stdout.isatty())}", flush=True)
    if written and not as_json:
        print("\n" + "\n".join(written), flush=True)
    return 0


def _check_folder(html: str) -> None:
    if html and not Path(html).resolve().parent.is_dir():
        found = f"there is no folder for {html}"
        raise LaunchError("reading --html", found=found, fix="Give a path in a folder that exists")


def _profile(options: RunOptions, *, shows_output: bool, trace: str = "") -> Profile:
    """Run the script of `options` on its ranks and return its profile."""
    prepared = prepare_run(options, os.environ)
    display = prepared.display if shows_output else LabelledWriter("silent", None)
    with scratch_folder("ddpilot-profile-") as folder:
        variables = {**prepared.variables, PROFILE_VARIABLE: str(folder)}
        if trace:
            Path(trace).mkdir(parents=True, exist_ok=True)
            variables[TRACE_VARIABLE] = str(Path(trace).resolve())
        make_observer = functools.partial(Watcher, WatchOptions(on_finding="stop"), more_hooks=(PROFILE_HOOK,))
        run_prepared(replace(prepared, variables=variables, display=display), make_observer)
        return read_profile(folder)


def run_scale(script: str, args: Sequence[str], *, sizes: str, rounds: int, html: str = "", as_json: bool) -> int:
    """Run `script` with `args` at several numbers of ranks, in turn, and print how its speed grows. Returns 0.

    `sizes`: numbers of ranks, separated by commas. `rounds`: how often each is run. `html`: path of the report to
    write; "" for none. A line to stderr says what runs.
    Raises as `run_profile`, and RecordError for a script without a DataLoader, whose samples cannot be counted.
    """
    numbers = _read_sizes(sizes)
    _check_folder(html)
    by_size: dict[int, list[Profile]] = {number: [] for number in numbers}
    for round_ in range(rounds):
        for number in numbers if round_ % 2 == 0 else reversed(numbers):
            ranks = f"{number} rank{'s' * (number > 1)}"
            print(f"round {round_ + 1} of {rounds}: {ranks}", file=sys.stderr, flush=True)
            options = RunOptions(target=script, args=tuple(args), nproc_per_node=number)
            profile = _profile(options, shows_output=False)
            if not profile.phases.samples_per_s:
                raise RecordError(
                    f"scaling {script}",
                    found="no DataLoader was read, so that samples cannot be counted",
                    fix="Read samples through a torch DataLoader; `ddpilot profile` works without",
                )
            by_size[number].append(profile)
    found = compare_sizes(Path(script).name, by_size)
    print(json.dumps(found.to_dict()) if as_json else found.render(color=sys.stdout.isatty()), flush=True)
    if html:
        found.to_html(html)
        if not as_json:
            print(f"\nreport: {html}", flush=True)
    return 0


def _read_sizes(sizes: str) -> list[int]:
    numbers = [int(text) if text.strip().isdecimal() else 0 for text in sizes.split(",")]
    if len(set(numbers)) != len(numbers) or len(numbers) < 2 or min(numbers) < 1:
        fix = "Give two or more numbers of ranks, such as 1,2,4"
        raise LaunchError("reading --nproc-per-node", found=f"{sizes!r}", fix=fix)
    return sorted(numbers)
