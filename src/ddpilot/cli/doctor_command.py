# SPDX-License-Identifier: Apache-2.0
"""``ddpilot doctor`` and ``ddpilot verify``: check a machine, the nodes of a job, or a program before a job runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpilot.diagnose.doctor import doctor
from ddpilot.diagnose.nccl_log import read_nccl_log
from ddpilot.errors import LaunchError


def run_doctor(*, checkpoint_dir: Path, as_json: bool, verbose: bool, **options: Any) -> int:
    """Print what `doctor` finds with `options`. Returns the exit status: 1 if there is an error, otherwise 0.

    Of the ranks of a job, rank 0 prints the diagnosis and has its exit status; a rank that cannot reach it, too.
    """
    found = doctor(checkpoint_dir=checkpoint_dir, **options)
    if not found.is_shown:
        return 0
    _print(found, as_json=as_json, verbose=verbose)
    return found.exit_status


def run_program_doctor(
    program: str, args: Sequence[str], *, live: bool, as_json: bool, verbose: bool, **options: Any
) -> int:
    """Print what `check_program` finds about `program`. Returns the exit status: 0 if nothing is wrong.

    While runs are made, a line for each is printed to stderr. Raises LaunchError for options of the machine's doctor.
    """
    from ddpilot.diagnose.ladder.ladder import check_program

    if not live:
        raise LaunchError(
            f"checking `{program}`",
            found="`--no-live`",
            fix="Leave it out: a program is checked on ranks of this machine",
        )
    found = check_program(program, *args, show=lambda line: print(line, file=sys.stderr, flush=True), **options)
    _print(found, as_json=as_json, verbose=verbose)
    return found.exit_status


def explain_nccl_log(paths: Sequence[str], *, as_json: bool, verbose: bool) -> int:
    """Print what NCCL's log in `paths` means. Returns the exit status: 1 if there is an error, otherwise 0."""
    found = read_nccl_log(paths)
    _print(found, as_json=as_json, verbose=verbose)
    return found.exit_status


def run_verify(program: str, args: Sequence[str], *, as_json: bool, verbose: bool, **options: Any) -> int:
    """Print what `verify` finds about `program` with `options`. Returns the exit status: 0 if the numbers agree.

    While runs are made, a line for each is printed to stderr.
    """
    from ddpilot.diagnose.verify.verify import verify

    result = verify(program, *args, show=lambda line: print(line, file=sys.stderr, flush=True), **options)
    _print(result, as_json=as_json, verbose=verbose)
    return result.exit_status


def _print(found: Any, *, as_json: bool, verbose: bool) -> None:
    if as_json:
        print(json.dumps(found.to_dict(), indent=1, ensure_ascii=False), flush=True)
    else:
        print(found.render(verbose=verbose, color=sys.stdout.isatty()), flush=True)
