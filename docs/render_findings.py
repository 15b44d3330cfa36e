# SPDX-License-Identifier: Apache-2.0
"""Write docs/errors/index.md from the pages of the findings: `python docs/render_findings.py`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from ddpilot.findings.catalog import Entry, all_entries

TARGET = Path(__file__).with_name("errors") / "index.md"
HEAD = """<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Made by docs/render_findings.py from src/ddpilot/findings/pages. Edit those, then run it. -->
# Findings

What ddpilot finds has a code, and every code a page: the messages, the cause, wrong and right code, other causes, and
the command that names the rank and the line. `ddpilot explain DDP201` prints it, also by name (`ddpilot explain
desync`) or by the message that a program printed (`ddpilot explain "Expected to mark a variable ready only once"`, or
`-` for what comes through a pipe). Plain words, such as `ddpilot explain hang`, list the pages that fit. [The FAQ
by symptom](../faq.md) has the command to run for each symptom.
"""
KINDS = {
    "1": "Starting and meeting",
    "2": "Ranks that wait",
    "3": "DDP, gradients and parameters",
    "4": "Data and meaning",
    "5": "In a `Loop` or a `Trainer`",
    "6": "Memory, checkpoints, the end",
    "7": "Messages that do not say what is wrong",
    "8": "Before a job runs",
}


def render_findings() -> str:
    """The whole page: all codes by kind, then from messages to codes."""
    parts = [HEAD]
    for digit, entries in groupby(all_entries(), key=lambda entry: entry.code[3]):
        rows = [
            f"| [{entry.code}]({_link(entry)}) | {entry.name} | {entry.severity} | {entry.title} |" for entry in entries
        ]
        parts += [f"## {KINDS[digit]}\n", "| code | name | | |\n|---|---|---|---|", *rows, ""]
    pairs = sorted(
        ((symptom, entry) for entry in all_entries() for symptom in entry.symptoms), key=lambda pair: pair[0]
    )
    parts += ["## From a message to its page\n", "`...` stands for what differs.\n", "| message | |\n|---|---|"]
    parts += [
        f"| `{symptom.replace('|', chr(92) + '|')}` | [{entry.code}]({_link(entry)}) |" for symptom, entry in pairs
    ]
    return "\n".join(parts) + "\n"


def _link(entry: Entry) -> str:
    return f"../../src/ddpilot/findings/pages/{entry.code}.md"


if __name__ == "__main__":
    TARGET.write_text(render_findings())
