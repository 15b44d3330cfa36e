# SPDX-License-Identifier: Apache-2.0
"""The zoo as a table, on the screen and in docs/internals/zoo.md: `python -m tests.zoo.table`, or `make zoo`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ddpilot.findings.catalog import find_entry
from tests.zoo.plain import HANG_AFTER_S, Plain, PlainRunner
from tests.zoo.watched import Case, Watched, judge, read_case, read_cases, run_case, run_watched

HERE = Path(__file__).parent
TARGET = HERE.parents[1] / "docs" / "internals" / "zoo.md"
NUM_AT_ONCE = 4
PAGES = "../../src/ddpilot/findings/pages"
BY_MESSAGE = ("DDP106", "DDP107", "DDP108", "DDP109", "DDP114", "DDP117", "DDP118", "DDP221", "DDP604")
BY_LAUNCH = ("DDP115", "DDP116")
HEAD = """<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Made by `make zoo`. -->
# The zoo

Programs that fail as users' programs do, each run on two ranks over gloo: without ddpilot, as torchrun would start it
(what hangs is cut after {limit:.0f} s), and by `ddpilot.launch`, watched and guarded. They are in `tests/zoo/cases`;
`make test` runs them. *With* is the code of the finding and the ranks that it names; the line is checked as well.
"""
CONTROLS_HEAD = """
## Right programs

From each of these nothing may be found, slow, uneven and unusual as they are.
"""
ELSEWHERE = """
## Not run here

What needs several GPUs, several hosts or Windows has a page, and is found by the message that it prints:
{by_message}.

What ddpilot's way of starting ranks takes away is tested there, since ranks are forked from a process that has used
nothing, and end with their parent, also when it is killed: {by_launch}.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, as it ended both ways."""

    case: Case
    plain: Plain
    watched: Watched
    wrong: tuple[str, ...]

    @property
    def what(self) -> str:
        """The first line of the script's docstring."""
        return describe(self.case.path)

    @property
    def found(self) -> str:
        """Code and ranks of the finding that is expected, or what came in its place."""
        hit = next(
            (finding for finding in self.watched.findings if finding.code in (self.case.code, self.case.other)), None
        )
        if hit is not None:
            ranks = ",".join(map(str, hit.ranks))
            return f"{hit.code} {hit.name}{f', rank {ranks}' if ranks else ''}"
        return "the exception" if not self.wrong else "nothing"


def describe(script: Path) -> str:
    """What its docstring says."""
    return (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n")[0]


def run_cases() -> Iterator[Row]:
    """Every case, plainly and watched."""
    paths = read_cases(HERE / "cases")
    with PlainRunner() as runner, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        plain = list(pool.map(runner.run, paths))
    for path, end in zip(paths, plain, strict=True):
        case = read_case(path)
        watched = run_case(case)
        yield Row(case=case, plain=end, watched=watched, wrong=tuple(judge(case, watched)))


def main() -> int:
    """Print the table and write the page; the exit status is 1 if a case is not named, or a right program is."""
    rows = list(run_cases())
    controls = {path: run_watched(path, 90) for path in read_cases(HERE / "controls")}
    alarmed = {path: run for path, run in controls.items() if run.findings or run.error is not None}
    table = Table("case", "without", "s", "with", "s", "")
    for row in rows:
        seconds = f"{row.plain.seconds:.1f}", f"{row.watched.seconds:.1f}"
        ok = "" if not row.wrong else "; ".join(row.wrong)
        table.add_row(row.case.path.stem, row.plain.kind_of_failure, seconds[0], row.found, seconds[1], ok)
    console = Console()
    console.print(table)
    num_named = sum(not row.wrong for row in rows)
    console.print(f"{num_named} of {len(rows)} named; {len(alarmed)} of {len(controls)} right programs have findings")
    for path, run in alarmed.items():
        console.print(f"  {path.stem}: {run.findings or run.error}")
    TARGET.write_text(render(rows, controls))
    return int(num_named < len(rows) or bool(alarmed))


def render(rows: list[Row], controls: dict[Path, Watched]) -> str:
    """docs/internals/zoo.md."""
    parts = [HEAD.format(limit=HANG_AFTER_S), "| case | what | without | s | with | s |\n|---|---|---|---|---|---|"]
    for row in rows:
        page = f" ([page]({PAGES}/{row.case.code}.md))" if row.case.code != "-" else ""
        seconds = f"{row.plain.seconds:.1f}", f"{row.watched.seconds:.1f}"
        what = row.what.replace("|", "\\|")
        parts.append(
            f"| {row.case.path.stem} | {what} | {row.plain.kind_of_failure} | {seconds[0]} "
            f"| {row.found}{page} | {seconds[1]} |"
        )
    parts += [CONTROLS_HEAD, "| program | what | findings |\n|---|---|---|"]
    parts += [f"| {path.stem} | {describe(path)} | {len(run.findings)} |" for path, run in controls.items()]
    return "\n".join([*parts, ELSEWHERE.format(by_message=_links(BY_MESSAGE), by_launch=_links(BY_LAUNCH))])


def _links(codes: Iterable[str]) -> str:
    return ", ".join(f"[{find_entry(code).name}]({PAGES}/{code}.md)" for code in codes)


if __name__ == "__main__":
    sys.exit(main())
