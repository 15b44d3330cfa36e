# SPDX-License-Identifier: Apache-2.0
"""The report of an observer on a job: displayed, saved next to the rings, and read back."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpilot.environments.private_files import read_own_text, write_own_text
from ddpilot.errors import DdpilotError
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import printable, render_ranks

FORMAT = 1
_JSON, _TEXT = "report.json", "report.txt"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings of a job, and what its ranks wait for. Renders itself in a terminal and in a notebook."""

    job: str
    """The job's id, as `ddpilot watch` lists it."""
    name: str
    world_size: int
    findings: Findings = field(default_factory=Findings)
    status: tuple[str, ...] = ()
    """What the ranks are waiting for without proof of an error, one line each."""
    unseen: tuple[int, ...] = ()
    """Ranks about which nothing is known here: those of other nodes, and those that do not record."""
    notes: tuple[str, ...] = ()
    """Further information, one line each."""
    made_s: float = field(default_factory=time.time)
    """Unix time in seconds."""

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.world_size} rank{'s' * (self.world_size > 1)}, job {self.job}"]
        lines += [f"  {line}" for line in (*self.status, *self.notes)]
        if self.unseen:
            lines.append(f"  not seen from here: {render_ranks(self.unseen)}")
        if not (self.findings or self.status):
            lines.append("  nothing is wrong as far as can be seen")
        return printable("\n".join(lines)) + (f"\n\n{self.findings}" if self.findings else "")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-serializable values."""
        return {
            "format": FORMAT,
            "job": self.job,
            "name": self.name,
            "world_size": self.world_size,
            "made_s": self.made_s,
            "status": list(self.status),
            "unseen": list(self.unseen),
            "notes": list(self.notes),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def save(self, folder: Path) -> None:
        """Write the report to `folder` as JSON and as text, each file atomically. Raises `OSError`."""
        for name, text in ((_JSON, json.dumps(self.to_dict(), indent=1, ensure_ascii=False)), (_TEXT, str(self))):
            write_own_text(folder / name, f"{text}\n")


def read_report(folder: Path) -> Report | None:
    """Read the report saved in `folder`; None if there is none. Raises `DdpilotError` for a damaged one."""
    path = folder / _JSON
    try:
        said = json.loads(read_own_text(path))
        return Report(
            job=said["job"],
            name=said["name"],
            world_size=said["world_size"],
            findings=Findings(Finding.from_dict(values) for values in said["findings"]),
            status=tuple(said["status"]),
            unseen=tuple(said["unseen"]),
            notes=tuple(said["notes"]),
            made_s=said["made_s"],
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise DdpilotError(f"reading {path}", found=found, fix="Look at report.txt next to it") from error
