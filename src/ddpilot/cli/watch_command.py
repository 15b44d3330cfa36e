# SPDX-License-Identifier: Apache-2.0
"""``ddpilot watch``: report what a job is waiting for, or why it ended."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ddpilot.errors import DdpilotError
from ddpilot.findings.text import printable
from ddpilot.watch.job_folder import JobInfo, check_jobs_root, jobs_root, list_jobs, read_job_info
from ddpilot.watch.past_jobs import explain_job, find_job
from ddpilot.watch.report import Report

FOUND_STATUS = 1
_EVERY_S = 2.0


def watch_job(word: str | None, *, as_json: bool = False, wait: bool = False, verbose: bool = False) -> int:
    """Print the report of the job that `word` identifies, or the list of jobs if it is None. Returns the exit status.

    The status is 1 if a finding is an error. `wait`: continue until the job has ended, and print changes. `verbose`:
    print all findings in full, even if they take more than one screen. Raises `DdpilotError` if there is no such job,
    or if the folder of jobs does not belong to this user.
    """
    if word is None:
        check_jobs_root()
        print(render_jobs(list_jobs()))
        return 0
    folder, about = find_job(word)
    shown: object = None
    while True:
        report = explain_job(folder, about)
        content = _content_of(report)
        if content != shown:
            text = report.render(verbose=verbose, color=sys.stdout.isatty())
            print(json.dumps(report.to_dict(), indent=1, ensure_ascii=False) if as_json else text, flush=True)
        if not (wait and about.is_running):
            return FOUND_STATUS if any(finding.severity == "error" for finding in report.findings) else 0
        shown = content
        time.sleep(_EVERY_S)
        try:
            about = read_job_info(folder)
        except DdpilotError:
            if folder.exists():
                raise
            print(f"{about.id} has ended well, and its folder is gone", file=sys.stderr)
            return 0


def _content_of(report: Report) -> object:
    """The content of a report without its durations, to detect changes."""
    findings = frozenset((finding.code, finding.summary) for finding in report.findings)
    return findings, report.notes, bool(report.status)


def render_jobs(jobs: list[tuple[Path, JobInfo]]) -> str:
    """One line for each job, the newest first."""
    if not jobs:
        return f"no jobs in {jobs_root()}: those that ended well leave nothing"
    rows = []
    for folder, about in jobs:
        state = "running" if about.is_running else "ended" if about.is_over else "elsewhere"
        where = f" on {about.host}" if about.is_elsewhere else ""
        saved = ", with a report" if (folder / "report.txt").exists() else ""
        when = time.strftime("%m-%d %H:%M", time.localtime(about.started_s))
        ranks = f"{about.world_size} rank{'s' * (about.world_size > 1)}"
        name = " ".join(printable(f"{about.name}{where}").split("\n"))
        rows.append(f"{about.id}  {state:<9}  {when}  {ranks:<9}  {name}{saved}")
    return "\n".join(rows)
