# SPDX-License-Identifier: Apache-2.0
"""``ddpilot profile`` and ``ddpilot scale``: run a script on ranks and report where the time of its updates goes."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ddpilot.environments.private_files import scratch_folder
from ddpilot.errors import DdpilotError, LaunchError, RankError, RecordError, WatchError
from ddpilot.launching.elastic.options import DEFAULT_PORT, OutputClosedError, RunOptions, RunStoppedError
from ddpilot.launching.elastic.run import run_prepared
from ddpilot.launching.elastic.target import PreparedRun, check_target, prepare_run
from ddpilot.module_names import PROFILE_HOOK
from ddpilot.output.writer import LabelledWriter
from ddpilot.profiler.clocks import find_offsets
from ddpilot.profiler.collecting import receive_files, send_files
from ddpilot.profiler.result import Profile, make_profile, read_profile
from ddpilot.profiler.scaling.comparison import compare_sizes
from ddpilot.profiler.spans_file import (
    OPTIONS_VARIABLE,
    PROFILE_VARIABLE,
    TRACE_VARIABLE,
    RankOptions,
    find_ranks,
    read_times,
)
from ddpilot.profiler.traces import MergedTrace, merge_traces, remove_traces
from ddpilot.watch.companion import Watcher
from ddpilot.watch.options import WatchOptions

INTERRUPTED = 130
"""Exit status after a signal, such as Ctrl-C, if there is a result."""
_NO_MORE = RankOptions()


def run_profile(
    options: RunOptions, *, html: str, trace: str, as_json: bool, rank_options: RankOptions = _NO_MORE
) -> int:
    """Run the script of `options`, and print its profile on node 0. Returns the exit status: 0, or 130 after Ctrl-C.

    `html`: path of the report to write; `trace`: folder for the traces; "" for none. On one node, a script that fails
    or is stopped is profiled up to then. Raises LaunchError before any rank starts, RankError or WatchError if the
    script fails, and RecordError if it made too few updates, if the nodes cannot exchange what their ranks have
    recorded, or if the report cannot be written.
    """
    check_report(html)
    ending: DdpilotError | None = None
    try:
        profile = _profile(options, shows_output=not as_json, trace=trace, rank_options=rank_options)
    except _EndedEarlyError as error:
        profile, ending = error.profile, error.reason
    if profile is None:
        return 0
    more = {} if ending is None else {"ended_early": ending.found}
    text = json.dumps({**profile.to_dict(), **more}) if as_json else f"\n{profile.render(color=sys.stdout.isatty())}"
    print(text, flush=True)  # before files are written: a full disk does not lose it
    written = []
    if html:
        write_report(profile.to_html, html, title=f"{options.name} on {len(profile.phases.ranks)} ranks")
        written.append(f"report: {html}")
    if trace:
        merged = merge_traces(Path(trace), profile.phases.ranks, find_offsets(profile.facts))
        written.append(_describe_trace(merged, profile))
    if written and not as_json:
        print("\n" + "\n".join(written), flush=True)
    return 0 if ending is None else _report_ending(ending, "the profile has the updates until then")


class _EndedEarlyError(Exception):
    """The script has not run to its end, and its ranks have recorded enough updates for `profile`."""

    def __init__(self, profile: Profile, reason: DdpilotError) -> None:
        self.profile, self.reason = profile, reason
        super().__init__(str(reason))


def _report_ending(reason: DdpilotError, result: str) -> int:
    """Report on stderr that the script was stopped, and return 130; raise `reason` if it has failed."""
    if not isinstance(reason, RunStoppedError):
        raise reason
    print(f"ddpilot: {reason.found}; {result}", file=sys.stderr, flush=True)
    return INTERRUPTED


def _describe_trace(merged: MergedTrace | None, profile: Profile) -> str:
    if merged is None:
        return "trace: the script made too few updates for one"
    notes = []
    slow_down = profile.facts[0].get("trace_slow_down")
    if slow_down is not None:
        notes.append(f"recorded updates took {slow_down:.2g} times as long as others")
    if merged.error_s:
        notes.append(f"clocks of the nodes are aligned within {merged.error_s * 1e3:.2g} ms")
    if merged.unaligned:
        ranks = ", ".join(map(str, merged.unaligned))
        notes.append(f"the clock of rank {ranks} could not be compared: times are as its node has them")
    return f"trace: {merged.path}" + (f" ({'; '.join(notes)})" if notes else "")


def _profile(
    options: RunOptions, *, shows_output: bool, trace: str = "", rank_options: RankOptions = _NO_MORE
) -> Profile | None:
    """Run the script of `options` on its ranks and return its profile; None on a node other than 0."""
    if not options.is_static:
        found = f"--rdzv-backend {options.rdzv_backend}"
        raise LaunchError("profiling on several nodes", found=found, fix="Leave it out, and give --master-addr")
    prepared = prepare_run(options, os.environ)
    display = prepared.display if shows_output else LabelledWriter("silent", None)
    with scratch_folder("ddpilot-profile-") as folder:
        variables = {
            **prepared.variables,
            PROFILE_VARIABLE: str(folder),
            OPTIONS_VARIABLE: rank_options.to_json(),
        }
        traces = _make_trace_folder(trace) if trace else None
        if traces is not None:
            variables[TRACE_VARIABLE] = str(traces)
        make_observer = functools.partial(Watcher, WatchOptions(on_finding="stop"), more_hooks=(PROFILE_HOOK,))
        try:
            run_prepared(replace(prepared, variables=variables, display=display), make_observer)
        except (RankError, RunStoppedError, WatchError) as error:
            profile = _read_part(folder) if options.nnodes[1] == 1 else None
            if profile is None or isinstance(error, OutputClosedError):
                raise
            raise _EndedEarlyError(profile, error) from error
        return read_profile(folder) if _exchange(prepared, folder, traces) else None


def _make_trace_folder(trace: str) -> Path:
    """Return the folder for traces, without those of an earlier profile."""
    folder = Path(trace).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_traces(folder)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        found = f"traces cannot be written to {trace}: {error.strerror}"
        raise LaunchError("reading --trace", found=found, fix="Give a folder that can be written to") from error


def _read_part(folder: Path) -> Profile | None:
    """Return the profile of a script that has not run to its end.

    None if a rank ended without writing its times, as one that was killed does, or if there are too few updates.
    """
    times = [read_times(folder, rank) for rank in find_ranks(folder)]
    if not times or not all(each.is_complete for each in times) or len(times) < times[0].facts["world_size"]:
        return None
    try:
        return make_profile(times)
    except RecordError:
        return None


def _exchange(prepared: PreparedRun, folder: Path, traces: Path | None) -> bool:
    """Send what ranks have recorded to node 0. True there, and on a single node."""
    options, endpoint = prepared.options, prepared.endpoint
    nnodes, run = options.nnodes[1], prepared.run_id
    if nnodes == 1 or endpoint is None:
        return True
    if options.node_rank == 0:
        receive_files(folder, traces, endpoint.addr, endpoint.port, nnodes=nnodes, run=run)
        return True
    folders = [folder, *([traces] if traces is not None else [])]
    send_files(folders, endpoint.addr, endpoint.port, node_rank=options.node_rank, run=run)
    print(f"node {options.node_rank} has sent what its ranks recorded to node 0", file=sys.stderr, flush=True)
    return False


def check_report(html: str) -> None:
    """Raise LaunchError if the file `html` cannot be written; "" is none."""
    if not html:
        return
    path = Path(html)
    fix = "Give a path of a file in a folder that exists and can be written to"
    if not path.resolve().parent.is_dir():
        raise LaunchError("reading --html", found=f"there is no folder for {html}", fix=fix)
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise LaunchError("reading --html", found=f"{html} cannot be written: {error.strerror}", fix=fix) from error


def write_report(write: Callable[..., None], html: str, **options: str) -> None:
    """Call `write`, a `to_html`, with the path `html`. Raises RecordError if the file cannot be written."""
    try:
        write(html, **options)
    except OSError as error:
        found = f"{html}: {error.strerror}"
        raise RecordError("writing the report", found=found, fix="The text above has the same figures") from error


def run_scale(
    options: RunOptions, *, sizes: str, rounds: int, as_json: bool, predict: str | None = None, html: str = ""
) -> int:
    """Run the script of `options` at several numbers of ranks, in turn, and print how its speed grows.

    `sizes`: numbers of ranks on a node, separated by commas. With several nodes node 0 runs all of them alone, and the
    last one again on all nodes. `rounds`: how often each is run. `predict`: further numbers of ranks that a model
    predicts; None: twice the largest, "": none. `html`: path of the report to write; "" for none. A line on stderr says
    what runs. Returns the exit status: 0, or 130 after Ctrl-C, where the runs before it are compared if two numbers of
    ranks have run. Raises as `run_profile`, and RecordError for a script without a DataLoader, whose samples cannot be
    counted.
    """
    check_report(html)
    check_target(options.kind, options.target)
    predicted = None if predict is None else _read_numbers(predict, "--predict", "Give numbers of ranks, such as 8,16")
    runs = _plan_runs(options, _read_sizes(sizes), rounds)
    by_size: dict[int, list[Profile]] = {}
    ending: DdpilotError | None = None
    for number, run in enumerate(runs):
        size = int(run.nproc_per_node) * run.nnodes[1]
        print(f"run {number + 1} of {len(runs)}: {_name_size(size, run)}", file=sys.stderr, flush=True)
        try:
            profile = _profile(run, shows_output=False, rank_options=RankOptions(measures_group=True))
        except (_EndedEarlyError, RunStoppedError) as error:
            ending = error.reason if isinstance(error, _EndedEarlyError) else error
            if len(by_size) < 2:
                raise ending from None
            break
        if profile is None:
            continue
        if not profile.phases.samples_per_s:
            raise RecordError(
                f"scaling {options.target}",
                found="no samples were counted: no batch of a known size was read through a torch DataLoader",
                fix="Read batches through a torch DataLoader; `ddpilot profile` works without",
            )
        by_size.setdefault(size, []).append(profile)
    if options.node_rank:
        return 0
    found = compare_sizes(options.name, by_size, predicted)
    print(json.dumps(found.to_dict()) if as_json else found.render(color=sys.stdout.isatty()), flush=True)
    if html:
        write_report(found.to_html, html)
    if html and not as_json:
        print(f"\nreport: {html}", flush=True)
    done = sum(map(len, by_size.values()))
    return 0 if ending is None else _report_ending(ending, f"the table has the {done} of {len(runs)} runs until then")


def _name_size(size: int, run: RunOptions) -> str:
    nodes = f" on {run.nnodes[1]} nodes" if run.nnodes[1] > 1 else ""
    return f"{size} rank{'s' * (size > 1)}{nodes}"


def _plan_runs(options: RunOptions, numbers: Sequence[int], rounds: int) -> list[RunOptions]:
    """Return the runs of all nodes in order; each round in the other direction than the one before."""
    alone = replace(options, nnodes=(1, 1), node_rank=0, master_addr=None, master_port=None)
    sizes = [] if options.node_rank else [replace(alone, nproc_per_node=number) for number in numbers]
    runs = []
    for round_ in range(rounds):
        those = list(sizes)
        if options.nnodes[1] > 1:
            # A port of its own for each run: a node that is early would meet the run before.
            port = (options.master_port or DEFAULT_PORT) + round_
            those.append(replace(options, nproc_per_node=numbers[-1], master_port=port))
        runs += those if round_ % 2 == 0 else those[::-1]
    return runs


def _read_sizes(sizes: str) -> list[int]:
    fix = "Give two or more different numbers of ranks, such as 1,2,4"
    numbers = _read_numbers(sizes, "--nproc-per-node", fix)
    if len(numbers) < 2:
        raise LaunchError("reading --nproc-per-node", found=f"{sizes!r}", fix=fix)
    return numbers


def _read_numbers(text: str, option: str, fix: str) -> list[int]:
    numbers = [int(each) if each.strip().isdecimal() else 0 for each in text.split(",")] if text else []
    if len(set(numbers)) != len(numbers) or min(numbers, default=1) < 1:
        raise LaunchError(f"reading {option}", found=f"{text!r}", fix=fix)
    return sorted(numbers)


def read_rank_options(window: str, *, memory: bool, nvtx: bool, has_trace: bool = True) -> RankOptions:
    """Return the options of ranks. `window`: updates to wait, to warm up and to keep, and how often; "": defaults.

    Raises LaunchError for a window that cannot be read, and for options of a trace without one (`has_trace`).
    """
    if not has_trace and (window or memory):
        name = "--trace-window" if window else "--trace-memory"
        raise LaunchError(f"reading {name}", found="it is given without --trace", fix="Add --trace DIR")
    parts = [int(each) if each.strip().isdecimal() else -1 for each in window.split(",")] if window else [3, 1, 5, 1]
    if len(parts) not in (3, 4) or min(parts) < 0:
        fix = "Give updates to leave out, to warm up and to keep, and how often, such as 3,1,5,1"
        raise LaunchError("reading --trace-window", found=f"{window!r}", fix=fix)
    wait, warm_up, active, *repeat = parts
    return RankOptions(
        wait=wait, warm_up=warm_up, active=active, repeat=repeat[0] if repeat else 1, memory=memory, nvtx=nvtx
    )
