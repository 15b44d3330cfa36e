# SPDX-License-Identifier: Apache-2.0
"""`Finding`: one result of any check."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from ddpilot.errors import DdpilotError
from ddpilot.findings.text import render_ranks
from ddpilot.user_files import CodeLine

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[str, ...] = get_args(Severity)
"""The severities, in the order in which findings are shown."""
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of a check: what was found, on which ranks, at which line, why, and what to do about it."""

    code: str
    """The code, such as ``DDP201``; never reused for something else."""
    name: str
    """Short name of the rule or kind, such as ``desync``."""
    severity: Severity
    """``error`` (results are wrong, or the job cannot complete), ``warning`` (likely unintended) or ``info``."""
    summary: str = ""
    """Summary in one line."""
    ranks: tuple[int, ...] = ()
    """The ranks concerned; empty if the finding is not about particular ranks."""
    place: CodeLine | None = None
    """The line of the user's code to look at first; None if there is none."""
    evidence: tuple[str, ...] = ()
    """Observed values, one line each."""
    why: str = ""
    """Why it happens."""
    fix: str = ""
    """Recommended fix."""
    source: str = ""
    """Further reading: a URL or a sentence."""
    explained_by: str = ""
    """Code of the finding about the same job that explains this one; empty if there is none."""

    def __post_init__(self) -> None:
        if not self.code or not self.name:
            raise _refuse(f"code={self.code!r}, name={self.name!r}", "Give both")
        if self.severity not in SEVERITIES:
            raise _refuse(f"severity={self.severity!r}", f"Use one of {', '.join(SEVERITIES)}")
        if any(rank < 0 for rank in self.ranks):
            raise _refuse(f"ranks={self.ranks}", "Ranks count from 0")

    @property
    def shows_place(self) -> bool:
        """True if a line of the evidence already shows the place."""
        return self.place is not None and any(str(self.place) in line for line in self.evidence)

    @property
    def says_ranks(self) -> bool:
        """True if the summary names the ranks and there is no place to show with them."""
        return self.place is None and re.search(rf"\b{render_ranks(self.ranks)}\b", self.summary) is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON-serializable values; tuples become lists."""
        return {**asdict(self), "ranks": list(self.ranks), "evidence": list(self.evidence)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_dict` converted. Raises `DdpilotError` for missing or unknown fields."""
        place = values.get("place")
        built = {
            **values,
            "ranks": tuple(values.get("ranks", ())),
            "evidence": tuple(values.get("evidence", ())),
            "place": None if place is None else _build(CodeLine, place),
        }
        return _build(cls, built)


def _build(cls: type[_T], values: Mapping[str, Any]) -> _T:
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise _refuse(f"unknown fields {', '.join(unknown)}", "Read it with the version of ddpilot that wrote it")
    try:
        return cls(**values)
    except TypeError as error:
        raise _refuse(str(error), "Give all fields that have no default") from error


def _refuse(found: str, fix: str) -> DdpilotError:
    return DdpilotError("describing a finding", found=found, fix=fix)
