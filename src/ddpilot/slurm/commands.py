# SPDX-License-Identifier: Apache-2.0
"""Call Slurm's commands: sbatch, scontrol, sacct and scancel. Each failure is a SlurmError with Slurm's own words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ddpilot.environments.slurm import parse_node_list
from ddpilot.errors import SlurmError
from ddpilot.module_names import NODE_REPORT
from ddpilot.slurm.records import SACCT_FIELDS, JobRecord, parse_lost_nodes, parse_sacct, parse_scontrol

_TIMEOUT_S = 60.0
_NO_ANSWER = "Unable to contact slurm controller"
_OF_JOBS = ("SLURM_", "SLURMD_", "SRUN_")
_OF_SITES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER", "SLURM_JWT")


def submit_job(script: str, *, folder: Path, options: Sequence[str] = ()) -> str:
    """Give a job script to sbatch, in `folder`; returns the job's number. Raises SlurmError with what sbatch says.

    `options`: further options of sbatch.
    """
    done = _call(["sbatch", "--parsable", *options], "submitting the job", stdin=script, folder=folder)
    if done.returncode != 0:
        fix = "Correct the field that it names; `--dry-run` prints the script without submitting it"
        raise SlurmError("submitting the job", found=f"sbatch said: {_words(done)}", fix=fix)
    return done.stdout.strip().partition(";")[0]  # with the cluster's name after it, where there are several


def check_script(script: str, *, folder: Path) -> str:
    """Have sbatch check a script without submitting it; what it says about the start. Raises SlurmError."""
    done = _call(["sbatch", "--test-only"], "checking the job script", stdin=script, folder=folder)
    if done.returncode != 0:
        raise SlurmError("checking the job script", found=f"sbatch said: {_words(done)}")
    return _words(done)


def read_job(job_id: str) -> JobRecord:
    """Return what `read_jobs` does about a job; of an array, its first task that is not done, or the last one."""
    records = read_jobs(job_id)
    return next((each for each in records if each.phase != "done"), records[-1])


def read_jobs(job_id: str, *, only_recent: bool = False) -> tuple[JobRecord, ...]:
    """Return what Slurm reports about a job, or each task of an array in their order; at least one record.

    By scontrol, and by sacct for what slurmctld has forgotten: a job, or tasks of an array that ended long before
    others. `only_recent`: leave out such tasks. Raises SlurmError if both know nothing.
    """
    did = f"looking up job {job_id}"
    if not re.fullmatch(r"\d+(_\d+)?", job_id):
        fix = "Give its number, as sbatch and `squeue --me` print it"
        raise SlurmError(did, found=f"{job_id!r} is not the number of a job", fix=fix)
    done = _call(["scontrol", "--oneliner", "show", "job", job_id], did)
    records = parse_scontrol(done.stdout)
    if done.returncode != 0 or not records:
        records = tuple(map(_with_output, _accounted(job_id)))
    elif "_" not in job_id and records[0].task_number >= 0 and not only_recent:
        recent = {number for each in records for number in each.task_numbers}
        old = [each for each in _accounted(job_id) if not recent.intersection(each.task_numbers)]
        records = (*map(_with_output, old), *records)
    if not records:
        is_outage = _NO_ANSWER in done.stderr
        fix = "See `squeue --me`; without accounting, Slurm forgets a job minutes after its end (MinJobAge)"
        fix = "Slurm's controller may be down for a while: see `scontrol ping`" if is_outage else fix
        raise SlurmError(did, found=_words(done) or "Slurm does not know it", fix=fix, is_outage=is_outage)
    if "_" in job_id:  # a task that waits together with others has their record
        records = tuple(replace(each, job_id=job_id) for each in records)
    return tuple(sorted(records, key=lambda each: each.task_number))


def read_accounting(job_id: str) -> tuple[JobRecord, ...]:
    """Return what sacct reports about a job and its steps; nothing if the site keeps no accounts."""
    words = ["--parsable2", "--noheader", "--duplicates", f"--jobs={job_id}", f"--format={','.join(SACCT_FIELDS)}"]
    done = _call(["sacct", *words], f"looking up job {job_id}")
    return parse_sacct(done.stdout) if done.returncode == 0 else ()


def _accounted(job_id: str) -> tuple[JobRecord, ...]:
    """What sacct reports about a job, or the tasks of an array, without their steps."""
    return tuple(each for each in read_accounting(job_id) if "." not in each.job_id)


def _with_output(record: JobRecord) -> JobRecord:
    """`record` with the output file of the default name, if there is one: sacct does not know the name."""
    name = f"slurm-{record.job_id}.out"
    path = Path(record.folder) / name
    return replace(record, output=str(path)) if record.folder and path.is_file() else record


def estimate_start(record: JobRecord) -> JobRecord:
    """`record` with the start that the scheduler expects, which scontrol alone often does not know."""
    if record.start:
        return record
    done = _call(["squeue", "--start", "--noheader", "--format=%S", f"--jobs={record.job_id}"], "looking up the start")
    start = done.stdout.strip().partition("\n")[0]
    return replace(record, start=start) if re.match(r"\d{4}-", start) else record


def find_lost_nodes(nodes: str) -> dict[str, str]:
    """By name of each node of the list `nodes` that is down or does not answer, Slurm's reason; {} if all are up."""
    if not nodes:
        return {}
    done = _call(["scontrol", "--oneliner", "show", "node", nodes], f"looking up nodes {nodes}")
    return parse_lost_nodes(done.stdout)


def ask_nodes(record: JobRecord) -> tuple[str, ...]:
    """Ask the watch on each node of a running job about its ranks, by a step of the job; the lines of all nodes.

    Empty if no rank there is watched. Raises SlurmError if Slurm starts no such step, or the nodes have no ddpilot.
    """
    nodes = parse_node_list(record.nodes, variable="NodeList")
    step = ["srun", f"--jobid={record.number}", "--overlap", "--mem=0", f"--nodes={len(nodes)}", "--ntasks-per-node=1"]
    words = [*step, "--label", sys.executable, "-m", NODE_REPORT, record.number]
    did = f"asking the nodes of job {record.job_id}"
    done = _call(words, did)
    if done.returncode != 0:
        raise SlurmError(did, found=_words(done))
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    labelled = sorted((int(label), i, text) for i, (label, _, text) in enumerate(lines) if label.isdecimal())
    return tuple(f"{nodes[number]}: {text}" for number, _, text in labelled if text)


def cancel_job(job_id: str) -> None:
    """Cancel a job. Raises SlurmError if Slurm refuses."""
    did = f"cancelling job {job_id}"
    done = _call(["scancel", job_id], did)
    if done.returncode != 0 or done.stderr.strip():
        raise SlurmError(did, found=f"scancel said: {_words(done)}")


def leave_job(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the variables of a job that this process is in, whose sizes srun would take over."""
    return {name: value for name, value in environ.items() if not name.startswith(_OF_JOBS) or name in _OF_SITES}


def _call(
    words: Sequence[str], did: str, *, stdin: str | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            input=stdin if stdin is not None else "",
            cwd=folder,
            env=leave_job(os.environ),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        fix = "Run it on a login node of the cluster, with Slurm's commands on PATH (often: module load slurm)"
        raise SlurmError(did, found=f"no command {words[0]}: Slurm is not installed here", fix=fix) from None
    except subprocess.TimeoutExpired:
        found = f"{words[0]} gave no answer in {_TIMEOUT_S:g} s"
        fix = "Slurm's controller may be busy or down: see `scontrol ping`"
        raise SlurmError(did, found=found, fix=fix, is_outage=True) from None


def _words(done: subprocess.CompletedProcess[str]) -> str:
    """What a command said, in one line and without its name in front."""
    text = (done.stderr.strip() or done.stdout.strip()) or f"nothing, exit status {done.returncode}"
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in text.splitlines()]
    return "; ".join(line for line in lines if line)
