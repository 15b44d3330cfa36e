# SPDX-License-Identifier: Apache-2.0
"""Explain a job from its folder alone: a running one, one that has ended, or one whose parent was killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from ddpilot.errors import DdpilotError
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import printable
from ddpilot.guard.rules.registry import RuleRunner, rules_for
from ddpilot.record.hook import find_rings
from ddpilot.watch.analysis import Analysis, analyze, render_end
from ddpilot.watch.explain.rank_exit import OF_ENDS
from ddpilot.watch.job_folder import JobInfo, check_jobs_root, jobs_root, list_jobs, read_job_info
from ddpilot.watch.report import Report, newest, read_report
from ddpilot.watch.snapshot.model import JobSnapshot
from ddpilot.watch.snapshot.reader import SnapshotReader

_BETWEEN_S = 1.0
"""Time between the two snapshots that show which ranks move."""


_MIN_PART = 4
"""Number of characters that name a job by a part of its id, at least."""


def find_job(word: str) -> tuple[Path, JobInfo]:
    """Return the job that `word` names: by its id or a part of it, the pid of one of its processes, or its folder.

    A part is the beginning or the end of an id, of at least four characters as in git: "1" would match every job from
    October to December. The processes of a job are its ranks, the processes that started them, and those that the ranks
    have started. Raises `DdpilotError` if no job matches, or more than one does.
    """
    if os.sep in word and Path(word).is_dir():
        return Path(word), read_job_info(Path(word))
    if not Path(word).is_dir():
        check_jobs_root()
    jobs = list_jobs()
    found = (
        [job for job in jobs if job[1].id == word]
        or (_find_by_process(int(word), jobs) if word.isdecimal() else [])
        or [job for job in jobs if len(word) >= _MIN_PART and _is_part(word, job[1].id)]
    )
    if len(found) == 1:
        return found[0]
    if not found and Path(word).is_dir():
        return Path(word), read_job_info(Path(word))
    if not jobs:
        fix = "Jobs that ended well are removed; the folder of a job can be given too"
        raise DdpilotError(f"looking for the job {word!r}", found=f"no jobs in {jobs_root()}", fix=fix)
    known = ", ".join(about.id for _, about in (found or jobs)[:5])
    raise DdpilotError(
        f"looking for the job {word!r}",
        found=f"{len(found)} of the {len(jobs)} jobs in {jobs_root()} match",
        fix=f"Give the id of one ({known}), the number of one of its processes, or its folder",
    )


def _is_part(word: str, job_id: str) -> bool:
    return job_id.startswith(word) or job_id.endswith(f"-{word}")


def _find_by_process(pid: int, jobs: Sequence[tuple[Path, JobInfo]]) -> list[tuple[Path, JobInfo]]:
    """Return the jobs that `pid` is a process of, or else those with an ancestor or a descendant of it.

    If some of these are running, only those: a process that has ended may have had its pid reused. Every process has
    the ancestor 1, which names none.
    """
    pids = [(job, pids_of(*job)) for job in jobs]
    ancestors = _ancestors(pid)
    found = [job for job, known in pids if pid in known] or [
        job
        for job, known in pids
        if pid > 1 and job[1].is_running and any(each in ancestors or pid in _ancestors(each) for each in known)
    ]
    return [job for job in found if job[1].is_running] or found


def _ancestors(pid: int) -> set[int]:
    try:
        return {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.Error:
        return set()


def pids_of(folder: Path, about: JobInfo) -> set[int]:
    """Return the processes of the ranks and the one that observes the job."""
    ranks = list(find_rings(folder))
    logs = SnapshotReader(folder, len(ranks), ranks, "").read({}).ranks
    return {about.pid, *(rank.process.pid for rank in logs.values())}


def explain_job(folder: Path, about: JobInfo) -> Report:
    """Report the job's present state and the findings of its observer. Takes the stacks of live ranks."""
    saved = read_report(folder)
    reader = SnapshotReader(folder, about.world_size, about.ranks, about.name)
    rules = RuleRunner(about.world_size, log=reader.full_log, rules=rules_for(about.world_size, about.ranks))
    earlier = reader.read({}) if about.is_running else None
    if earlier is not None:
        time.sleep(_BETWEEN_S)
    job = reader.add_last_stacks(_read_snapshot(reader, about))
    analysis = _analyze(reader, job, earlier)
    findings = [*(saved.findings if saved else ()), *rules.feed(reader.take_entries(), job.now_ns)]
    findings += [
        *(() if about.is_running else rules.finish(job.now_ns)),
        *_without_reported_ends(analysis.findings, saved),
    ]
    end = render_end(analysis, findings)
    complaints = reader.complaints()
    unseen = tuple(r for r in range(about.world_size) if r not in job.ranks or job.ranks[r].log is None)
    return Report(
        job=about.id,
        name=about.name,
        world_size=about.world_size,
        findings=Findings(newest(findings)),
        status=analysis.status,
        unseen=unseen,
        notes=(_describe_state(about, job), *dict.fromkeys((*(saved.notes if saved else ()), *complaints, *end))),
    )


def _read_snapshot(reader: SnapshotReader, about: JobInfo) -> JobSnapshot:
    """Gather the job's present state. On a different machine its processes have ended if its observer recorded that."""
    job = reader.read({})
    if not (about.is_elsewhere and about.is_over):
        return job
    ranks = [each for each in job.ranks.values() if each.log is not None]
    ended = [replace(each, process=replace(each.process, state="ended")) for each in ranks]
    return reader.read({each.rank: each for each in ended})


def _without_reported_ends(findings: Iterable[Finding], saved: Report | None) -> list[Finding]:
    """Drop ends of ranks that the observer has reported, or has caused because of an error that it reported.

    The observer knew how the ranks ended; their rings only record whether they did.
    """
    known = saved.findings if saved else ()
    if any(each.severity == "error" and each.code not in OF_ENDS for each in known):
        return [each for each in findings if each.code not in OF_ENDS]
    reported = {rank for finding in known if finding.code in OF_ENDS for rank in finding.ranks}
    return [each for each in findings if each.code not in OF_ENDS or reported.isdisjoint(each.ranks)]


def _analyze(reader: SnapshotReader, job: JobSnapshot, earlier: JobSnapshot | None) -> Analysis:
    analysis = analyze(job, earlier)
    if analysis.needs_stacks:
        analysis = analyze(reader.add_stacks(job, analysis.needs_stacks), earlier)
    return analysis


def _describe_state(about: JobInfo, job: JobSnapshot) -> str:
    command = printable(" ".join(about.command))
    if about.is_elsewhere and about.ended_s is None:
        seen = "only that machine shows whether it still runs"
        return f"was started {_when(about.started_s)} on {about.host}, {seen}: {command}"
    live = [rank for rank, each in job.ranks.items() if each.process.state == "running"]
    if live or about.is_running:
        return f"running since {_when(about.started_s)} on {about.host}: {command}"
    how = "" if any(each.log and each.log.closed_ns for each in job.ranks.values()) else ", not cleanly"
    return f"has ended{how}; it was started {_when(about.started_s)} on {about.host}: {command}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
