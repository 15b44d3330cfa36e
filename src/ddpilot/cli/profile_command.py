# SPDX-License-Identifier: Apache-2.0
"""``ddpilot profile``: run a script on several ranks and report where the time of its updates goes."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddpilot.environments.private_files import scratch_folder
from ddpilot.errors import LaunchError
from ddpilot.launching.elastic.options import RunOptions
from ddpilot.launching.elastic.prepare import prepare_run
from ddpilot.launching.elastic.run import run_prepared
from ddpilot.module_names import PROFILE_HOOK
from ddpilot.output.writer import LabelledWriter
from ddpilot.profiler.report import write_report
from ddpilot.profiler.result import read_profile
from ddpilot.profiler.spans_file import PROFILE_VARIABLE
from ddpilot.watch.companion import Watcher
from ddpilot.watch.options import WatchOptions


def run_profile(script: str, args: Sequence[str], *, nproc_per_node: str, html: str, as_json: bool) -> int:
    """Run `script` with `args`, and print its profile. Returns the exit status, 0.

    `html`: path of the report to write, "" for none. Raises LaunchError before any rank starts, RankError or WatchError
    if the script fails, and RecordError if it made too few updates.
    """
    if html and not Path(html).resolve().parent.is_dir():
        raise LaunchError(
            "reading --html", found=f"there is no folder for {html}", fix="Give a path in a folder that exists"
        )
    nproc = int(nproc_per_node) if nproc_per_node.isdecimal() else nproc_per_node
    prepared = prepare_run(RunOptions(target=script, args=tuple(args), nproc_per_node=nproc), os.environ)
    display = LabelledWriter("silent", None) if as_json else prepared.display
    with scratch_folder("ddpilot-profile-") as folder:
        variables = {**prepared.variables, PROFILE_VARIABLE: str(folder)}
        make_observer = functools.partial(Watcher, WatchOptions(on_finding="stop"), more_hooks=(PROFILE_HOOK,))
        run_prepared(replace(prepared, variables=variables, display=display), make_observer)
        profile = read_profile(folder)
    if html:
        write_report(profile, Path(html), title=f"{Path(script).name} on {len(profile.phases.ranks)} ranks")
    print(json.dumps(profile.to_dict()) if as_json else f"\n{profile.render(color=sys.stdout.isatty())}", flush=True)
    if html and not as_json:
        print(f"\nreport: {html}", flush=True)
    return 0
