# SPDX-License-Identifier: Apache-2.0
"""Write the table of rules in docs/how_to/lint.md from the rules: `python docs/render_lint.py`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from ddpilot.findings.catalog import find_entry
from ddpilot.lint.rules import RULES

TARGET = Path(__file__).with_name("how_to") / "lint.md"
MARKERS = ("<!-- rules: made by docs/render_lint.py -->\n", "<!-- end of rules -->\n")


def render_rules() -> str:
    """Return the table: a row for each code, with what each of its rules reports."""
    rows = ["| code | name | reports | `--fix` |", "|---|---|---|---|"]
    for code, rules in groupby(RULES, key=lambda rule: rule.code):
        group = list(rules)
        reports = "<br>".join(rule.summary for rule in group)
        fix = "yes" if any(rule.is_fixable for rule in group) else ""
        page = f"../../src/ddpilot/findings/pages/{code}.md"
        rows.append(f"| [{code}]({page}) | {find_entry(code).name} | {reports} | {fix} |")
    return "\n".join(rows) + "\n"


def render_page(page: str) -> str:
    """Return `page` with the table between its markers."""
    head, _, rest = page.partition(MARKERS[0])
    return head + MARKERS[0] + render_rules() + MARKERS[1] + rest.partition(MARKERS[1])[2]


if __name__ == "__main__":
    TARGET.write_text(render_page(TARGET.read_text()))
