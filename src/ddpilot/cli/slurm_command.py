# SPDX-License-Identifier: Apache-2.0
"""``ddpilot slurm``: render, submit and follow a job; ``follow``, ``status`` and ``cancel`` for one that is there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpilot.cli.job_parser import FieldOptions, JobParser, parse_pair
from ddpilot.errors import SlurmError, did_you_mean
from ddpilot.option_parser import HelpRequested, parse_int
from ddpilot.slurm.arrays import describe_array, follow_array, is_array, summarize_array
from ddpilot.slurm.commands import ask_nodes, cancel_job, check_script, read_jobs, submit_job
from ddpilot.slurm.follow import describe_job, follow_job, summarize_job
from ddpilot.slurm.options import SUBSTITUTES, JobOptions, find_defaults, options_with_defaults
from ddpilot.slurm.records import JobRecord
from ddpilot.slurm.script import render_job_script

INTERRUPTED_STATUS = 130
_DID = "reading the options of `ddpilot slurm`"

_USAGE = """\
ddpilot slurm SCRIPT [OPTIONS] -- [ARGUMENTS OF THE SCRIPT]...
       ddpilot slurm follow JOBID
       ddpilot slurm status JOBID
       ddpilot slurm cancel JOBID"""

_DESCRIPTION = """\
Run a script as a Slurm job: show the job script, submit it, and follow its output. Ctrl-C leaves the job running.

  ddpilot slurm train.py --nodes 2 --gpus-per-node 4 --time 2:00:00 --account X -- --epochs 90
  ddpilot slurm train.py --nodes 2 --gpus-per-node 4 --dry-run > job.sh

Defaults come from [slurm] in .ddpilot.toml, here or in a folder above or at home, or from [tool.ddpilot.slurm] in
pyproject.toml. Further options of sbatch are passed through: write --name=value."""

_OPTIONS: FieldOptions = (
    ("-N/--nodes", "N", parse_int, "number of nodes (1)"),
    ("-n/--nproc-per-node/--ntasks-per-node", "N", parse_int, "ranks on each node (one per GPU, else 1)"),
    (
        "--launcher",
        "NAME",
        str,
        "python (srun starts each rank), torchrun or ddpilot (one agent per node), auto (auto)",
    ),
    ("--gpus-per-node", "N", str, "GPUs on each node: a number, or TYPE:NUMBER"),
    ("--gpus-per-task", "N", str, "GPUs of each task, for sites that require it"),
    ("--gres", "LIST", str, "generic resources of each node, such as gpu:4"),
    ("-c/--cpus-per-task", "N", parse_int, "cores of each task: of a rank, or of a node's agent and all its ranks"),
    ("-t/--time", "TIME", str, "time limit: minutes, HH:MM:SS or D-HH:MM:SS"),
    ("--mem", "SIZE", str, "memory of each node, such as 64G"),
    ("--mem-per-cpu", "SIZE", str, "memory for each core"),
    ("--mem-per-gpu", "SIZE", str, "memory for each GPU"),
    ("-A/--account", "NAME", str, "account to charge"),
    ("-p/--partition", "NAME", str, "partition"),
    ("-q/--qos", "NAME", str, "quality of service"),
    ("-C/--constraint", "LIST", str, "features that nodes must have"),
    ("--reservation", "NAME", str, "reservation to run in"),
    ("-w/--nodelist", "LIST", str, "nodes to use"),
    ("-x/--exclude", "LIST", str, "nodes not to use"),
    ("-J/--job-name", "NAME", str, "name of the job (the script's)"),
    ("-D/--chdir", "DIR", str, "folder to run in (this one)"),
    ("-o/--output", "FILE", str, "file for the output (slurm-%%j.out)"),
    ("-e/--error", "FILE", str, "file for standard error (that of --output)"),
    ("-a/--array", "LIST", str, "numbers of an array's tasks, such as 0-7"),
    ("-d/--dependency", "LIST", str, "jobs to wait for, such as afterok:1234"),
    ("-b/--begin", "TIME", str, "earliest start"),
    ("--mail-type", "LIST", str, "events to send mail about, such as END,FAIL"),
    ("--mail-user", "ADDRESS", str, "address for mail"),
    ("--signal", "SIG@S", str, "signal before the time limit, such as USR1@120"),
    ("--python", "PATH", str, "the interpreter on the nodes (python)"),
    ("--venv", "DIR", str, "virtual environment on the nodes"),
    ("--conda", "NAME", str, "conda environment"),
    ("--container", "IMAGE", str, "image for `apptainer exec`"),
    ("--container-image", "IMAGE", str, "image for srun's --container-image"),
)
"""Options that are one field of `JobOptions` each."""

_MAX_TASKS = 20
"""Tasks of an array that `status` shows one by one."""

_VERBS = ("follow", "status", "cancel")


def make_parser() -> JobParser:
    """Return the parser of a job's options. Names in its result are fields of `JobOptions`, and four of our own."""
    parser = JobParser(
        "slurm", SlurmError, "options of sbatch", usage=_USAGE, description=_DESCRIPTION, substitutes=SUBSTITUTES
    )
    parser.add_argument("target", metavar="SCRIPT", help="a Python script; with --module, the name of a module")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, run as with `python -m`")
    parser.add_argument("--dry-run", action="store_true", help="print the job script and do not submit it")
    parser.add_argument(
        "--test-only", action="store_true", help="have sbatch check the job script, and do not submit it"
    )
    parser.add_argument("--no-follow", dest="follow", action="store_false", help="submit, print the number and exit")
    parser.add_fields(_OPTIONS)
    parser.add_argument(
        "--requeue", action="store_true", help="requeue the job when it is preempted or saved at --signal"
    )
    parser.add_argument("--exclusive", nargs="?", const=True, metavar="user", help="no other job on the nodes")
    parser.add_argument("--uv", action="store_true", help="run with `uv run`")
    parser.add_argument("--modules", metavar="NAME,NAME", type=_names, help="modules to load")
    parser.add_argument(
        "--env", metavar="NAME=VALUE", action="append", type=parse_pair, help="a variable to set; repeatable"
    )
    parser.add_argument("--setup", metavar="LINE", action="append", help="shell to run before the ranks; repeatable")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def read_words(words: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values in `words` by name, `extra` with options of sbatch, and the script's arguments."""
    values, extra, args = make_parser().read_job(words)
    if extra:
        values["extra"] = {name.replace("-", "_"): value for name, value in extra.items()}
    if "env" in values:
        values["env"] = dict(values["env"])
    if "setup" in values:
        values["setup"] = tuple(values["setup"])
    return values, args


def run_words(words: Sequence[str]) -> int:
    """Execute ``ddpilot slurm`` with these words; returns the exit status: the job's if it is followed to its end.

    Raises SlurmError if the words are invalid or Slurm refuses.
    """
    if not words:
        print(make_parser().format_help(), end="")
        return 2
    if words[0] in _VERBS:
        return _run_verb(words[0], words[1:])
    if len(words) == 2 and words[1][0].isdecimal() and (guess := did_you_mean(words[0], _VERBS)):
        raise SlurmError(_DID, found=f"{words[0]!r} is not one of {', '.join(_VERBS)}", fix=guess, field="target")
    try:
        values, args = read_words(words)
    except HelpRequested as helped:
        print(helped, end="")
        return 0
    own = {name: values.pop(name, default) for name, default in (("module", False), ("follow", True))}
    dry_run, test_only = values.pop("dry_run", False), values.pop("test_only", False)
    target = values.pop("target")
    options = options_with_defaults(values, Path.cwd(), Path.home())
    _check_target(target, own["module"], Path(options.chdir or "."))
    _check_output(options)
    script = render_job_script(options, target, args, module=own["module"])
    if dry_run:
        print(script, end="")
        return 0
    if test_only:
        print(check_script(script, folder=Path.cwd()))
        return 0
    _, source = find_defaults(Path.cwd(), Path.home())
    print(script)
    job_id = submit_job(script, folder=Path.cwd())
    _note(f"submitted job {job_id}{f', with defaults from {source}' if source else ''}")
    return _follow(job_id) if own["follow"] else 0


def _check_target(target: str, module: bool, folder: Path) -> None:
    if module or (folder / target).is_file():
        return
    if any(mark in target for mark in ("/", ".")) or not target.isalpha():
        found = f"there is no file {target}{f' in {folder}' if str(folder) != '.' else ''}"
    else:
        found = f"{target!r} is neither a file nor one of {', '.join(_VERBS)}"
    raise SlurmError(_DID, found=found, fix="Give the path of a Python script first, then options", field="target")


def _check_output(options: JobOptions) -> None:
    """Refuse files in a folder that is not there: Slurm would end the job without a message."""
    for name in ("output", "error"):
        folder = (Path(options.chdir or ".") / (getattr(options, name) or "")).parent
        if "%" not in str(folder) and not folder.is_absolute() and not folder.is_dir():
            fix = f"`mkdir -p {folder}` first: Slurm makes no folders"
            raise SlurmError(_DID, found=f"`{name}`: there is no folder {folder}", fix=fix, field=name)


def _run_verb(verb: str, words: Sequence[str]) -> int:
    if len(words) != 1:
        fix = f"Write ddpilot slurm {verb} 1234; a script of that name is ./{verb}"
        raise SlurmError(_DID, found=f"`{shlex.join([verb, *words])}` has {len(words)} job numbers", fix=fix)
    job_id = words[0]
    if verb == "follow":
        return _follow(job_id)
    if verb == "cancel":
        return _cancel(job_id)
    records = read_jobs(job_id)
    if len(records) > 1 and is_array(records):
        is_over = all(each.phase == "done" for each in records)
        print(summarize_array(job_id, records) if is_over else describe_array(job_id, records))
        records = tuple(each for each in records if each.state != "COMPLETED")[:_MAX_TASKS]
    for record in records:
        _print_status(record)
    return 0


def _cancel(job_id: str) -> int:
    records = read_jobs(job_id)
    if all(each.phase == "done" for each in records):
        print(summarize_array(job_id, records) if len(records) > 1 else summarize_job(records[0]))
    else:
        cancel_job(job_id)
        print(f"job {job_id} is cancelled")
    return 0


def _print_status(record: JobRecord) -> None:
    print(summarize_job(record) if record.phase == "done" else describe_job(record))
    if record.state == "RUNNING":
        _print_ranks(record)


def _print_ranks(record: JobRecord) -> None:
    """Print what the watch on the nodes knows about the ranks of a running job."""
    try:
        lines = ask_nodes(record)
    except SlurmError as error:
        print(f"  ranks: not known ({error.found})")
        return
    unwatched = ("ranks: not watched; submit with `--env DDPILOT_WATCH=1`, or `--launcher ddpilot`",)
    print("\n".join(f"  {line}" for line in lines or unwatched))


def _follow(job_id: str) -> int:
    try:
        records = read_jobs(job_id)
        if "_" not in job_id and is_array(records):
            records = follow_array(job_id, show=_show, note=_note)
            return next((status for each in records if (status := _status(each))), 0)
        record, summary = follow_job(job_id, show=_show, note=_note)
    except KeyboardInterrupt:
        come_back = f"`ddpilot slurm follow {job_id}` follows it again, `ddpilot slurm cancel {job_id}` ends it"
        _note(f"job {job_id} was not cancelled: {come_back}")
        return INTERRUPTED_STATUS
    _note(str(summary))
    return _status(record)


def _status(record: JobRecord) -> int:
    if record.state == "COMPLETED":
        return 0
    return record.exitcode or (128 + record.exit_signal if record.exit_signal else 1)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(line: str) -> None:
    print(f"ddpilot: {line}", file=sys.stderr, flush=True)
