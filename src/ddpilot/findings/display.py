# SPDX-License-Identifier: Apache-2.0
"""`Findings`: a sequence of findings that renders itself in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ddpilot.findings.as_html import render_html
from ddpilot.findings.as_text import render_text
from ddpilot.findings.finding import Finding


@dataclass(frozen=True, init=False, repr=False)
class Findings(Sequence[Finding]):
    """An immutable sequence of findings in the order given; a slice is a `Findings` too."""

    items: tuple[Finding, ...]

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        object.__setattr__(self, "items", tuple(findings))

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Finding: ...

    @overload
    def __getitem__(self, index: slice) -> Findings: ...

    def __getitem__(self, index: int | slice) -> Finding | Findings:
        return Findings(self.items[index]) if isinstance(index, slice) else self.items[index]

    def __str__(self) -> str:
        return render_text(self.items)

    def __repr__(self) -> str:
        return f"Findings({', '.join(finding.code for finding in self.items)})"

    def _repr_html_(self) -> str:
        return render_html(self.items)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))
