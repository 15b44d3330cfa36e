# SPDX-License-Identifier: Apache-2.0
"""Run one check on facts that a test makes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpilot.diagnose.facts import Answers, Facts, RankReport
from ddpilot.findings.finding import Finding


def make_facts(**given: Any) -> Facts:
    """Facts of two ranks on this machine without environment variables, unless given."""
    return Facts(**{"environ": {}, "nproc_per_node": 2, **given})


def make_report(rank: int, world_size: int = 2, **given: Any) -> RankReport:
    """The report of a rank on the CPU."""
    versions = {"python": "3.11.7", "torch": "2.13.0+cpu", "devices": [], "num_cores": 8}
    known = {
        "versions": versions,
        "device": "cpu",
        "backend": "gloo",
        "link": "loopback",
        "host": "a",
        "num_threads": 1,
    }
    return RankReport(rank=rank, world_size=world_size, **{**known, **given})


def statuses(check: Callable[[Facts], Answers], facts: Facts) -> list[str]:
    """``ok``, or severity and code, of each line of `check`."""
    return [f"{answer.severity} {answer.code}" if isinstance(answer, Finding) else "ok" for answer in check(facts)]


def text_of(check: Callable[[Facts], Answers], facts: Facts) -> str:
    """All lines of `check`: what was found, evidence and fix."""
    return "\n".join(
        "\n".join([answer.summary, *answer.evidence, answer.fix]) if isinstance(answer, Finding) else answer
        for answer in check(facts)
    )


CHECK = """
import json, sys
from pathlib import Path
from ddpilot.diagnose.facts import Facts
from ddpilot.diagnose.registry import CHECKS
from ddpilot.findings.finding import Finding
name, root, prepare, folder = sys.argv[1:]
exec(prepare)
check = next(check for check in CHECKS if check.name == name)
facts = Facts(environ={}, nproc_per_node=2, root=Path(root), checkpoint_dir=Path(folder))
found = [[a.severity, a.code, a.summary, a.fix] if isinstance(a, Finding) else ["ok", a] for a in check.run(facts)]
print(json.dumps(found))
"""


def check_in_child(
    name: str, *, root: Path = Path("/"), prepare: str = "", around: tuple[str, ...] = (), folder: Path = Path()
) -> list[list[str]]:
    """The lines of the check `name` in a process that runs `prepare` first, started by the command `around`."""
    words = [*around, sys.executable, "-c", CHECK, name, str(root), prepare, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout)
    return found
