# SPDX-License-Identifier: Apache-2.0
"""Run checks one after the other, each in a separate process, and write the report. Does not import torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddpilot.errors import DdpilotError
from ddpilot.gpu_check.catalogue import PAIR_ON_ONE_DEVICE, Check, Outcome, Status
from ddpilot.module_names import GPU_CHECK_CHILD

FORMAT = 1
_FACTS_LIMIT_S = 120.0
_EXIT_GRACE_S = 10.0
"""Seconds that a process may take to exit after it has written its result."""
_POLL_S = 0.05
_OUTPUT_CHARACTERS = 6000
_INNERMOST_FIRST = "(most recent call first):"
_LABELS: Mapping[Status, str] = {"ok": "ok", "failed": "FAILED", "cannot be shown": "-"}
_LEFT_OUT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables set in the shell of a job, removed as the checks are separate jobs."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a check and its duration in seconds. `output`: the end of its processes' output unless ok."""

    check: Check
    outcome: Outcome
    seconds: float
    output: str = ""


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """The result of a child process: its value, or None and `why` there is none."""

    value: Any
    why: str
    seconds: float
    output: str


def run_checks(
    checks: Sequence[Check],
    *,
    json_path: Path,
    limit_s: float | None = None,
    show: Callable[[str], None] = print,
) -> list[Result]:
    """Run `checks`, pass one line about each to `show`, and update the report at `json_path` after each.

    `limit_s`: time limit of each check; None: its own. Raises DdpilotError if torch cannot be imported or the report
    cannot be written; the first report is written before the first check.
    """
    facts = read_facts()
    show(describe_facts(facts))
    results: list[Result] = []
    began = datetime.now(timezone.utc)
    _write_report(json_path, facts, began, results)
    for check in checks:
        why = why_not(check, facts, results)
        if why:
            result = Result(check=check, outcome=Outcome(status="cannot be shown", evidence=why), seconds=0.0)
        else:
            result = _run_one(check, limit_s or check.limit_s)
        results.append(result)
        show(render_result(result))
        _write_report(json_path, facts, began, results)
    return results


def read_facts() -> dict[str, Any]:
    """Return versions and devices, read in a separate process. Raises DdpilotError if torch cannot be imported."""
    ended = _run_child("facts", _FACTS_LIMIT_S)
    if ended.value is None:
        raise DdpilotError(
            "detecting accelerators",
            found=f"{ended.why}: {ended.output[-600:].strip()}",
            fix=f"Check that `{sys.executable} -c 'import torch'` works",
        )
    return {"ddpilot": _own_version(), **ended.value}


def _own_version() -> str | None:
    try:
        return version("ddpilot")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return None


def describe_facts(facts: Mapping[str, Any]) -> str:
    """Return one line with the devices and versions, and a second one if there is no accelerator."""
    names: dict[str, int] = {}
    for device in facts["devices"]:
        names[device["name"]] = names.get(device["name"], 0) + 1
    devices = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no accelerator"
    versions = [f"{name} {facts[name]}" for name in ("torch", "cuda", "nccl", "driver", "python") if facts.get(name)]
    line = f"{devices}; ddpilot {facts['ddpilot'] or 'not installed'}, {', '.join(versions)}"
    if facts["devices"]:
        return line
    return f"{line}\nOnly claims that the CPU and gloo can show are checked, none about accelerators."


def why_not(check: Check, facts: Mapping[str, Any], results: Iterable[Result]) -> str:
    """Return why `check` cannot be shown on this machine; empty if it can."""
    num, is_cuda = len(facts["devices"]), facts["kind"] == "cuda" and bool(facts["cuda"])
    if check.only_cuda and not is_cuda:
        return "no NVIDIA device is visible"
    if num < check.num_devices:
        return f"needs {check.num_devices} device{'s' * (check.num_devices > 1)}, {num or 'none'} here"
    if missing := [name for name in check.packages if find_spec(name) is None]:
        return f"{' and '.join(missing)} not installed: pip install 'ddpilot[notebook]'"
    if check.is_pair and num == 1 and check.name != PAIR_ON_ONE_DEVICE:
        if not is_cuda:
            return "needs 2 devices, 1 here"
        ended = [each.outcome.status for each in results if each.check.name == PAIR_ON_ONE_DEVICE]
        if ended and ended != ["ok"]:
            return f"needs 2 devices, 1 here, and two ranks of NCCL on it failed ({PAIR_ON_ONE_DEVICE})"
    return ""


def _run_one(check: Check, limit_s: float) -> Result:
    ended = _run_child(check.name, limit_s)
    if ended.value is None:
        outcome = Outcome(status="failed", evidence=f"{ended.why}: {_last_line(ended.output)}")
    else:
        outcome = Outcome(**ended.value)
    output = "" if outcome.status == "ok" else ended.output[-_OUTPUT_CHARACTERS:]
    return Result(check=check, outcome=outcome, seconds=ended.seconds, output=output)


def _run_child(name: str, limit_s: float) -> _Ended:
    with tempfile.TemporaryDirectory(prefix="gc-", ignore_cleanup_errors=True) as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "output"
        environ = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
        environ |= {"TMPDIR": folder, "DDPILOT_JOBS_DIR": str(Path(folder) / "jobs"), "PYTHONUNBUFFERED": "1"}
        began = time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", GPU_CHECK_CHILD, name, str(result), str(limit_s)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                why = _wait(child, result, limit_s)
                seconds = time.monotonic() - began
            finally:
                _kill_group(child)
        value = json.loads(result.read_text()) if result.exists() else None
        return _Ended(value=value, why=why, seconds=seconds, output=log.read_text(errors="replace"))


def _wait(child: subprocess.Popen[bytes], result: Path, limit_s: float) -> str:
    """Wait for the result and then for the exit; return why there is no result, or "" if there is one.

    Returns after `limit_s` seconds without a result, and at most ten seconds after a result or exit.
    """
    end = time.monotonic() + limit_s
    while not result.exists() and child.poll() is None:
        if time.monotonic() > end:
            return f"timed out after {limit_s:g} s (--time-limit-s)"
        time.sleep(_POLL_S)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_EXIT_GRACE_S)
    return "" if result.exists() else f"the process ended with status {child.returncode}"


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the processes that are left in the child's process group. Its ranks exit with it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # the session that `_run_child` started
    child.wait()


def _last_line(text: str) -> str:
    """Return the last line of output, or where the main thread was if the output ends with faulthandler's stacks."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "no output"
    stacks = [at for at, line in enumerate(lines[:-1]) if line.endswith(_INNERMOST_FIRST)]
    is_stack = bool(stacks) and all(line.startswith('File "') for line in lines[stacks[-1] + 1 :])
    return lines[stacks[-1] + 1 if is_stack else -1][:300]


def render_result(result: Result) -> str:
    """Return label, name, seconds and evidence, such as "ok      group_of_one  3.2 s  nccl on cuda:0"."""
    evidence = " ".join(result.outcome.evidence.split())
    if result.outcome.status == "cannot be shown":
        evidence = f"cannot be shown here: {evidence}"
    return f"{_LABELS[result.outcome.status]:<6}  {result.check.name:<33} {result.seconds:5.1f} s  {evidence}"


def render_summary(results: Sequence[Result], json_path: Path) -> str:
    """Return the number of results by status, the failed checks, and the path of the report."""
    counts = count_statuses(results)
    failed = [each.check.name for each in results if each.outcome.status == "failed"]
    lines = [f"{counts['ok']} ok, {counts['failed']} FAILED, {counts['cannot be shown']} cannot be shown here"]
    if failed:
        lines.append(f"FAILED: {', '.join(failed)}; their output is in the report")
    lines.append(f"report: {json_path}")
    return "\n".join(lines)


def count_statuses(results: Iterable[Result]) -> dict[Status, int]:
    """Return the number of results by status."""
    counts: dict[Status, int] = {"ok": 0, "failed": 0, "cannot be shown": 0}
    for each in results:
        counts[each.outcome.status] += 1
    return counts


def _write_report(path: Path, facts: Mapping[str, Any], began: datetime, results: Sequence[Result]) -> None:
    report = {
        "format": FORMAT,
        "made": began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        **facts,
        "counts": count_statuses(results),
        "checks": [
            {
                "name": each.check.name,
                "claim": each.check.claim,
                "status": each.outcome.status,
                "evidence": each.outcome.evidence,
                "seconds": round(each.seconds, 2),
                **({"output": each.output} if each.output else {}),
            }
            for each in results
        ],
    }
    draft = path.with_name(f"{path.name}.new")
    try:
        draft.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        os.replace(draft, path)
    except OSError as error:
        raise DdpilotError(
            "writing the report", found=f"{path}: {error.strerror}", fix="Give a file with --json PATH"
        ) from error
