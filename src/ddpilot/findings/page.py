# SPDX-License-Identifier: Apache-2.0
"""The whole page of a finding: its text, how to get the rank and the line, and its form in a terminal."""

from __future__ import annotations

import re
from functools import cache

from ddpilot.findings.catalog import FOUND_BY, Entry

FOOTER_HEADING = "How to get the rank and the line"
NAMES = (
    "In the code, `dist` is `torch.distributed` and `DDP` is `torch.nn.parallel.DistributedDataParallel`. `rank`,\n"
    "`local_rank` and `world_size` are the numbers that torchrun sets as `RANK`, `LOCAL_RANK` and `WORLD_SIZE`.\n"
    "`model` is a DDP model unless the code wraps it."
)
"""What the names in the code of a page mean, if the code does not say it."""

WATCHED_TORCHRUN = "DDPILOT_WATCH=1 torchrun --nproc-per-node 2 train.py"
"""How to start a script so that its ranks are watched, as an example."""

_HOW = {
    "watch": f"""Start the job as before, with one variable set. ddpilot prints the ranks, the line and the fix:

```console
$ {WATCHED_TORCHRUN}
```

The variable also works with `srun` and `mpirun`, and needs no change of the script. Jobs that `ddpilot run`,
`ddpilot.launch` or a notebook session started are watched without it. `ddpilot watch` shows the report again.""",
    "lint": """`ddpilot lint` reads the script and reports the line, without running it:

```console
$ ddpilot lint train.py
```""",
    "doctor": """`ddpilot doctor` checks the machine before a job runs; `--nodes` compares the nodes of a job:

```console
$ ddpilot doctor
$ srun ddpilot doctor --nodes
```""",
    "program doctor": """`ddpilot doctor` runs a few steps of a program, on one rank and on several:

```console
$ ddpilot doctor train.py
```""",
    "verify": """`ddpilot verify` runs the program on one rank and on several, and compares the numbers:

```console
$ ddpilot verify train.py -n 2
```""",
    "profile": """`ddpilot profile` measures the updates of every rank, and names the line that takes the time:

```console
$ ddpilot profile train.py -n 2
```""",
    "scale": """`ddpilot scale` runs the script at several numbers of ranks, and compares the speed:

```console
$ ddpilot scale train.py -n 1,2
```""",
    "loop": """In a `Loop`, rank 0 prints it. `loop.explain()` shows it again, with the numbers that it is based on.""",
    "message": """`ddpilot run` in place of `torchrun` prints the first error, with its rank, its line and this page.
`ddpilot explain` looks up a log that already exists:

```console
$ ddpilot run -n 2 train.py
$ ddpilot explain - < train.log
```""",
}
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,2} .+$", re.MULTILINE)
_HEADING_COLORS = {"## Wrong": "1;31", "## Right": "1;32"}


def full_text(entry: Entry) -> str:
    """Return the page in Markdown, with the section on how to get the rank and the line before its sources."""
    head, fix, rest = entry.text.partition("\n## How to fix it\n")
    rest, _, sources = rest.partition("\n## Sources\n")
    how = "\n\n".join(_HOW[each] for each in FOUND_BY if each in entry.found_by)
    return f"{head}{_names_in(entry)}{fix}{rest}\n## {FOOTER_HEADING}\n{how}\n\n## Sources\n{sources}"


def render_page(entry: Entry, *, color: bool = False) -> str:
    """Return the page for a terminal: code is indented instead of fenced. `color`: use ANSI colors."""
    text = _FENCE.sub(lambda found: _indented(found["code"], found["language"] if color else ""), full_text(entry))
    if color:
        text = _HEADING.sub(lambda found: f"\x1b[{_HEADING_COLORS.get(found[0], '1')}m{found[0]}\x1b[0m", text)
    return text


def blocks_of(entry: Entry, heading: str) -> tuple[tuple[str, str], ...]:
    """Return the fenced blocks under `heading`, each as its language and its text."""
    return tuple((found["language"], found["code"]) for found in _FENCE.finditer(entry.section(heading)))


def _names_in(entry: Entry) -> str:
    code = "".join(
        text for name in ("Wrong", "Right") for language, text in blocks_of(entry, name) if language == "python"
    )
    return f"\n{NAMES}\n" if re.search(r"\b(dist\.|DDP\(|model\(|rank\b|local_rank\b|world_size\b)", code) else ""


def _indented(code: str, language: str) -> str:
    shown = _highlighted(code, language) if language else code.rstrip()
    return "\n".join(f"    {line}".rstrip() for line in shown.splitlines())


@cache
def _highlighted(code: str, language: str) -> str:
    # Only a terminal with colors needs these imports.
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(force_terminal=True, color_system="standard", width=200)
    syntax = Syntax(code.rstrip(), language, theme="ansi_dark", background_color="default")
    with console.capture() as captured:
        console.print(syntax.highlight(code.rstrip()), soft_wrap=True, end="")
    return captured.get()
