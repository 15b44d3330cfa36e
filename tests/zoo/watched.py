# SPDX-License-Identifier: Apache-2.0
"""Run a script of the zoo on ranks of ddpilot, watched, and keep what is found."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.leftovers import unused_shared_memory
from ddpilot.errors import LaunchError, LaunchTimeoutError, RankError, WatchError
from ddpilot.findings.finding import Finding
from ddpilot.launcher import Launcher
from tests.preload import PRELOAD
from tests.zoo.plain import run_as_main

_WITHOUT = re.compile(r"^# without: (.+)$", re.MULTILINE)
_EXPECTED = re.compile(r"^# finding: (?P<code>DDP\d{3}|-)(?: or (?P<other>DDP\d{3}))?(?:, rank (?P<rank>\d))?$", re.M)
_MARK = "# HERE"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script, how it ends without ddpilot, and what has to be found."""

    path: Path
    without: tuple[str, ...]
    """Any of them, since which one is a matter of timing: ``hang``, ``error``, ``SIGABRT``, ``silent``, ``ok``."""
    code: str
    """``-``: the exception itself says it all."""
    other: str | None
    """A finding that is as right, where which one comes first is a matter of timing."""
    rank: int | None
    lines: frozenset[int]
    """One of which has to be named; empty where none is marked."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """How a script ended with ddpilot."""

    findings: tuple[Finding, ...]
    error: LaunchError | RankError | None
    seconds: float


def read_case(path: Path) -> Case:
    """The case in `path`, with what its comments say."""
    text = path.read_text()
    without, expected = _WITHOUT.search(text), _EXPECTED.search(text)
    assert without is not None, path
    assert expected is not None, path
    return Case(
        path=path,
        without=tuple(without[1].split(" or ")),
        code=expected["code"],
        other=expected["other"],
        rank=int(expected["rank"]) if expected["rank"] else None,
        lines=frozenset(number for number, line in enumerate(text.splitlines(), 1) if line.endswith(_MARK)),
    )


def read_cases(folder: Path) -> list[Path]:
    """The scripts in `folder`, by name."""
    return sorted(folder.glob("*.py"))


def run_watched(
    script: Path,
    limit_s: float = 60.0,
    *,
    until: str = "",
    stall_warn_s: float = 30.0,
    on_device: bool = False,
    num_ranks: int = 2,
) -> Watched:
    """Run `script` on `num_ranks` ranks; every finding is kept, an error or the code `until` stops it.

    `on_device`: with its tensors on the ranks' accelerators, and the collectives of those.
    """
    seen: list[Finding] = []

    def keep(finding: Finding) -> str | None:
        seen.append(finding)
        return "stop" if finding.severity == "error" or finding.code == until else None

    launcher = Launcher(
        nproc_per_node=num_ranks,
        backend=None if on_device else "gloo",
        output="silent",
        timeout_s=limit_s,
        on_finding=keep,
        stall_warn_s=stall_warn_s,
        preload=PRELOAD,
    )
    began_s = time.monotonic()
    error: LaunchError | RankError | None = None
    try:
        launcher.run(_run_on_device if on_device else _run_script, str(script))
    except (RankError, WatchError) as caught:
        error = caught
        seen += [finding for finding in caught.findings if finding not in seen]
    except LaunchTimeoutError as caught:
        error = caught
    return Watched(findings=tuple(seen), error=error, seconds=time.monotonic() - began_s)


def run_case(case: Case, *, on_device: bool = False, num_ranks: int = 2) -> Watched:
    """Run the script of `case` until its finding is there; what is unproven is a warning after four seconds here."""
    before = set(os.listdir("/dev/shm"))
    watched = run_watched(case.path, 40.0, until=case.code, stall_warn_s=4.0, on_device=on_device, num_ranks=num_ranks)
    for name in set(os.listdir("/dev/shm")) - before:
        if name.startswith("torch_") and unused_shared_memory([name]):  # of a loader's worker that was killed
            Path("/dev/shm", name).unlink(missing_ok=True)
    for file in Path(tempfile.gettempdir()).glob("zoo-*.pt"):
        file.unlink(missing_ok=True)
    return watched


def judge(case: Case, watched: Watched) -> Sequence[str]:
    """What is not as `case` asks for; empty where all is."""
    if case.code == "-":
        is_said = isinstance(watched.error, RankError) and watched.error.rank == case.rank
        return () if is_said else (f"expected the exception of rank {case.rank}, got {watched.error}",)
    codes = [finding.code for finding in watched.findings]
    found = next((finding for finding in watched.findings if finding.code in (case.code, case.other)), None)
    if found is None:
        return (f"expected {case.code}, got {codes or 'nothing'}: {watched.error}",)
    wrong = []
    if case.rank is not None and case.rank not in found.ranks:
        wrong.append(f"expected rank {case.rank}, got {found.ranks}")
    if case.lines and not _named_lines(found, case.path.name) & case.lines:
        wrong.append(f"expected line {sorted(case.lines)}, got {found.place} and {found.evidence}")
    return wrong


def _named_lines(finding: Finding, name: str) -> set[int]:
    text = "\n".join([str(finding.place), finding.summary, *finding.evidence, finding.why])
    found = re.findall(rf"{re.escape(name)}:(\d+)|\(line (\d+)\)", text)
    return {int(first or second) for first, second in found}


def _run_script(script: str) -> None:
    run_as_main(script)


def _run_on_device(script: str) -> None:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(accelerator.type)
    own = torch.distributed.Backend.default_device_backend_map[accelerator.type]
    text = Path(script).read_text().replace('("gloo")', f'("cpu:gloo,{accelerator.type}:{own}")')
    run_as_main(script, text)
