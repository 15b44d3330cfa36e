# SPDX-License-Identifier: Apache-2.0
"""Say what has run on which GPU, from docs/gpu_runs.json: in docs/gpus.md, tests/gpu, the README and notes on pages.

python docs/render_gpus.py                                        write the pages
python docs/render_gpus.py --add ddpilot-gpu-check.json           add a report of `ddpilot gpu-check`, then write
python docs/render_gpus.py --add REPORT --tests "31 passed"       with the last line of `pytest tests/gpu`
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpilot.gpu_check.catalogue import CHECKS

DOCS = Path(__file__).parent
RUNS = DOCS / "gpu_runs.json"
PAGE = DOCS / "gpus.md"
COMPATIBILITY = DOCS / "compatibility.md"
README = DOCS.parent / "README.md"
TESTS = DOCS.parent / "tests" / "gpu" / "README.md"
STATES = ("every change", "by hand", "never")
_MARK = re.compile(r"(<!-- (\w+) -->\n).*?(?=<!-- end of \2 -->)", re.DOTALL)
_VERSIONS = ("torch", "cuda", "nccl", "driver", "python", "ddpilot")

Run = Mapping[str, Any]


def read_runs() -> list[Run]:
    """What has run, the oldest first."""
    runs: list[Run] = json.loads(RUNS.read_text())["runs"]
    return runs


def summarise(report: Mapping[str, Any], tests: str) -> dict[str, Any]:
    """What is kept of a report of `ddpilot gpu-check`; `tests`: the last line of `pytest tests/gpu`, or ""."""
    if not report["devices"]:
        raise SystemExit("this report is of a machine without an accelerator, and says nothing about one")
    devices = Counter(device["name"] for device in report["devices"])
    failed = [check["name"] for check in report["checks"] if check["status"] == "failed"]
    return {
        "made": report["made"],
        "devices": ", ".join(f"{count} x {name}" for name, count in devices.items()),
        "versions": {name: report[name] for name in _VERSIONS if report.get(name)},
        "ok": report["counts"]["ok"],
        "failed": failed,
        "not_shown": report["counts"]["cannot be shown"],
        "tests": tests,
    }


def render_table(runs: Sequence[Run]) -> str:
    """A row for each run, and one for the emulated accelerator."""
    rows = ["| when | devices | versions | `ddpilot gpu-check` | `pytest tests/gpu` |", "|---|---|---|---|---|"]
    rows += [
        f"| {run['made'][:10]} | {run['devices']} | "
        f"{', '.join(f'{name} {text}' for name, text in run['versions'].items())} | "
        f"{_render_counts(run)} | {run['tests'] or 'not run'} |"
        for run in reversed(runs)
    ]
    rows.append("| every change | 2 emulated ones, on the CPU | torch 2.13 | a part, in `tests/accelerator` | no |")
    return "\n".join(rows) + "\n"


def _render_counts(run: Run) -> str:
    failed = f"{len(run['failed'])} failed ({', '.join(run['failed'])})" if run["failed"] else "0 failed"
    return f"{run['ok']} ok, {failed}, {run['not_shown']} not shown there"


def render_state(runs: Sequence[Run]) -> str:
    """One sentence: the newest run, or that there was none."""
    if not runs:
        return "**nothing has run on a GPU so far**"
    newest = runs[-1]
    return f"last run on {newest['made'][:10]} on {newest['devices']}: {_render_counts(newest)}"


def render_checks() -> str:
    """A row for each check."""
    rows = ["| check | claim | needs |", "|---|---|---|"]
    rows += [f"| `{check.name}` | {check.claim} | {check.needs} |" for check in CHECKS]
    return "\n".join(rows) + "\n"


def render_note(runs: Sequence[Run], page: Path) -> str:
    """What `page` says of its blocks that need a GPU: not yet run on one, or when; with a link to the table."""
    table = f"{os.path.relpath(PAGE, page.parent).replace(os.sep, '/')}#what-has-run-where"
    if not runs:
        return f"*Not yet run on a GPU ([what has run where]({table})).*\n"
    return f"*On GPUs: {render_state(runs)} ([what has run where]({table})).*\n"


def render_compatibility(runs: Sequence[Run]) -> str:
    """A row for each operating system, Python, torch and backend, in three states; those of GPUs are in `runs`."""
    rows: list[dict[str, str]] = json.loads(COMPATIBILITY.with_suffix(".json").read_text())["rows"]
    gpu = {"system": "Linux x86-64, NVIDIA GPUs", "backend": "nccl", "state": "never"}
    gpus = [
        {
            **gpu,
            "system": f"Linux x86-64, {run['devices']}",
            "state": "by hand",
            "when": run["made"][:10],
            **{name: run["versions"].get(name, "") for name in ("python", "torch")},
            "what": _render_counts(run),
        }
        for run in reversed(runs)
    ]
    columns = ("system", "python", "torch", "backend", "state", "when", "what")
    ordered = sorted([*(gpus or [gpu]), *rows], key=lambda row: STATES.index(row["state"]))
    lines = [f"| {' | '.join(row.get(column, '') for column in columns)} |" for row in ordered]
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines]) + "\n"


def render_pages(runs: Sequence[Run]) -> dict[Path, str]:
    """The texts of all files with such parts."""
    parts = {"state": f"State: {render_state(runs)}.\n", "runs": render_table(runs), "checks": render_checks()}
    parts["compatibility"] = render_compatibility(runs)
    pages = {path: _fill(path.read_text(), parts) for path in (PAGE, TESTS, COMPATIBILITY)}
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text()
        if "<!-- gpu -->" in text:
            pages[path] = _fill(text, {"gpu": render_note(runs, path)})
    state = f"**GPUs and NCCL:** {render_state(runs)} ([what ran where](docs/gpus.md#what-has-run-where)).\n"
    return {**pages, README: _fill(README.read_text(), {"state": state})}


def _fill(text: str, parts: Mapping[str, str]) -> str:
    return _MARK.sub(lambda found: found[1] + parts.get(found[2], found[0].removeprefix(found[1])), text)


def main() -> None:
    """Add a report where one is given, then write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="REPORT")
    parser.add_argument("--tests", default="", metavar="TEXT")
    given = parser.parse_args()
    if given.add is not None:
        run = summarise(json.loads(given.add.read_text()), given.tests)
        runs = sorted([*read_runs(), run], key=lambda each: str(each["made"]))
        RUNS.write_text(json.dumps({"runs": runs}, indent=1, ensure_ascii=False) + "\n")
    for path, text in render_pages(read_runs()).items():
        path.write_text(text)


if __name__ == "__main__":
    main()
