# SPDX-License-Identifier: Apache-2.0
"""`SlurmLauncher`: run a function on the ranks of a Slurm job. `SlurmJob`: follow it and get its values."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpilot.errors import LaunchTimeoutError, RankError, SlurmError
from ddpilot.launching.first_failure import RankEnd, build_error
from ddpilot.launching.launch import check_function
from ddpilot.launching.rank_reports import Raised
from ddpilot.launching.shipping.pickling import RankResults, open_parcel
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.module_names import FUNCTION_RANK
from ddpilot.slurm.commands import cancel_job, estimate_start, read_job, submit_job
from ddpilot.slurm.follow import LOOK_S, Looks, describe_job, follow_job, summarize_job
from ddpilot.slurm.function_rank import (
    CALL,
    SETTINGS,
    error_path,
    read_parcel,
    result_path,
    write_atomically,
    write_parcel,
)
from ddpilot.slurm.options import JobOptions, options_with_defaults, refusal
from ddpilot.slurm.script import render_job_script
from ddpilot.user_files import collect_sources

_LATE_S = 10.0
"""Seconds that a file may need to be seen from here, over a network file system."""
_OUTPUT = "job.out"


class SlurmLauncher:
    """Run functions on the ranks of Slurm jobs: `SlurmLauncher(nodes=2, gpus_per_node=4, time="2:00:00")`.

    - `options`: the fields of `JobOptions`, and any option of sbatch by its name. Options that are not given come from
      .ddpilot.toml or pyproject.toml.
    - `folder`: a directory that the nodes see, too. Each job gets a subdirectory for its call, output and values.
      Created if needed.

    The nodes need this interpreter, or `python`, `venv`, `conda` or a container that has ddpilot. Raises SlurmError,
    with the field's name, for a wrong value.
    """

    def __init__(self, *, folder: str | os.PathLike[str] = "ddpilot-jobs", **options: Any) -> None:
        self.folder = Path(folder).absolute()
        given = options_with_defaults(options, Path.cwd(), Path.home())
        if given.launcher not in ("auto", "python"):
            raise refusal("launcher", given.launcher, 'srun starts the ranks of a function: leave it at "auto"')
        if given.array is not None:
            raise refusal("array", given.array, "A function is one job: call `submit` once for each")
        has_python = any((given.python != "python", given.venv, given.conda, given.uv, given.container))
        interpreter = given.python if has_python or given.container_image else sys.executable
        self.options: JobOptions = replace(given, launcher="python", python=interpreter)

    def __repr__(self) -> str:
        return f"SlurmLauncher(nodes={self.options.nodes}, folder='{self.folder}')"

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> SlurmJob:
        """Submit `fn(*args, **kwargs)` to run on every rank, and return the job at once.

        `fn` and its arguments may be defined in notebook cells; they are pickled by value. Ranks have torchrun's
        environment and enter a process group themselves. Raises ShipError, with the path of what cannot be pickled, or
        SlurmError, with the message of sbatch.
        """
        name = check_function(fn)
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = self.folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(mode=0o700)  # pickles are code
        parts = {"fn": fn, "args": args, "kwargs": kwargs}
        parcel, known = ship("ddpilot-call", parts, (fn, args, kwargs), did=f"submitting `{name}`", known=None)
        write_parcel(folder / CALL, parcel)
        write_atomically(folder / SETTINGS, json.dumps(_settings(name)).encode())
        options = replace(
            self.options,
            job_name=self.options.job_name or "".join(c if c.isalnum() or c in "._-" else "_" for c in name),
            output=self.options.output or str(folder / _OUTPUT),
        )
        script = render_job_script(options, FUNCTION_RANK, [str(folder)], module=True)
        (folder / "job.sh").write_text(script)
        job_id = submit_job(script, folder=Path.cwd())
        return SlurmJob(job_id, folder, name, options.nodes * options.num_ranks_per_node, known)

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RankResults:
        """Submit `fn(*args, **kwargs)`, show the job's output, and return every rank's value, by rank.

        Raises what `submit` and `SlurmJob.result` raise. Ctrl-C leaves the job running.
        """
        job = self.submit(fn, *args, **kwargs)
        job.follow()
        return job.result()


def _settings(name: str) -> dict[str, Any]:
    main = vars(sys.modules["__main__"])
    return {
        "function_name": name,
        "sys_path": [os.path.abspath(each) for each in sys.path],
        "argv": sys.argv,
        "main": {each: text for each in ("__file__", "__package__") if isinstance(text := main.get(each), str)},
        "sources": collect_sources(),
    }


@dataclass
class SlurmJob:
    """A submitted function. Its methods may be called in any state of the job, also after it has ended."""

    job_id: str
    """Slurm's number of the job."""
    folder: Path
    """Directory with the job's call, output and values."""
    function_name: str
    """Name of the function, for messages."""
    num_ranks: int
    """Number of ranks."""
    known: list[Any] = field(default_factory=list, repr=False)
    """Definitions that were pickled by value; results have instances of these definitions."""

    def status(self) -> str:
        """Return a line about the job's state: why it is pending, where it runs, or why it ended."""
        record = read_job(self.job_id)
        if record.phase == "pending":
            record = estimate_start(record)
        return str(summarize_job(record)) if record.phase == "done" else describe_job(record)

    def done(self) -> bool:
        """Return True if the job has ended."""
        return read_job(self.job_id).phase == "done"

    def cancel(self) -> None:
        """Cancel the job."""
        cancel_job(self.job_id)

    def follow(self) -> None:
        """Show the job's output as it is written, and its state on stderr, until it ends. Ctrl-C leaves the job
        running."""
        _, summary = follow_job(self.job_id, show=_show, note=_note)
        _note(str(summary))

    def result(self, timeout_s: float | None = None) -> RankResults:
        """Wait for the end of the job and return every rank's value, by rank.

        `timeout_s`: seconds to wait; None: no limit. Raises RankError for the earliest failure of a rank, with its
        traceback; SlurmError if the job ended without one, with the reason; LaunchTimeoutError after `timeout_s`, while
        the job continues.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        looks, record = Looks(_note), read_job(self.job_id)
        while record.phase != "done":
            left_s = LOOK_S if end_s is None else min(LOOK_S, end_s - time.monotonic())
            if left_s <= 0:
                found = f"{describe_job(record)} after {timeout_s:g} s"
                fix = "Wait longer; `cancel()` ends it"
                raise LaunchTimeoutError(f"waiting for `{self.function_name}`", found=found, fix=fix)
            time.sleep(left_s)
            record = looks.look(lambda: read_job(self.job_id), record)
        paths = [result_path(self.folder, rank) for rank in range(self.num_ranks)]
        if record.state == "COMPLETED" and _are_there(paths):
            return RankResults([read_parcel(path) for path in paths], self.known)
        error = self._first_error()
        if error is not None:
            raise error
        did = f"running `{self.function_name}` on {self.num_ranks} ranks"
        fix = f"Its output is in {record.output or self.folder}"
        raise SlurmError(did, found=str(summarize_job(record)), fix=fix)

    def _first_error(self) -> RankError | None:
        """The error of the rank that raised first and not because of a different rank; None if no rank raised."""
        ends = []
        hosts = {}
        for rank in range(self.num_ranks):
            try:
                report = json.loads(error_path(self.folder, rank).read_text())
            except FileNotFoundError:
                continue
            hosts[rank] = report.pop("host")
            ends.append(RankEnd(rank=rank, raised=Raised(**report), error=self._open_error(rank)))
        if not ends:
            return None
        first = min(ends, key=lambda end: (end.is_victim, end.time_s))
        victims = [end.rank for end in ends if end.is_victim and end is not first]
        error = build_error(
            first,
            function_name=self.function_name,
            num_ranks=self.num_ranks,
            last_lines=(),
            victims=victims,
            returned=[rank for rank in range(self.num_ranks) if result_path(self.folder, rank).exists()],
        )
        error.host = hosts[first.rank]
        error.args = (error.render(),)
        return error

    def _open_error(self, rank: int) -> BaseException | None:
        try:
            error, _ = open_parcel(read_parcel(error_path(self.folder, rank).with_suffix(".parcel")), self.known)
        except Exception:  # noqa: BLE001  # unpickling runs the exception's own code; the report has its text
            return None
        return error if isinstance(error, BaseException) else None


def _are_there(paths: list[Path]) -> bool:
    """Whether all files are there, or come within a few seconds."""
    end_s = time.monotonic() + _LATE_S
    while not all(path.exists() for path in paths):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.1)
    return True


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(line: str) -> None:
    sys.stderr.write(f"ddpilot: {line}\n")
    sys.stderr.flush()
