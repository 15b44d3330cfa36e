# SPDX-License-Identifier: Apache-2.0
"""The commands of README, docs and finding pages are accepted by the command line: verbs, options and values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ddpilot.cli import k8s_command, run_command, slurm_command
from ddpilot.cli.app import app

ROOT = Path(__file__).parents[3]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "src" / "ddpilot" / "findings" / "pages").glob("*.md")),
)
FENCE = re.compile(r"^```(bash|console|sh|text|ipython)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[ '|])ddpilot (?P<words>[a-z].*)")
ENDS = {"||", "|", "&", ">", "&&", "<", "2>&1"}
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


def commands_of(page: Path) -> Iterator[list[str]]:
    """Yield the words after `ddpilot` of each command in the blocks of a page."""
    for kind, text in FENCE.findall(page.read_text()):
        for line in text.replace("\\\n", " ").splitlines():
            is_typed = line.startswith("$ ") if kind in ("console", "text") else not line.startswith("#")
            found = COMMAND.search(line.removeprefix("$ ").partition("  #")[0]) if is_typed else None
            if found is not None:
                words = shlex.split(found["words"].removesuffix("'"))
                yield words[: min((at for at, word in enumerate(words) if word in ENDS), default=None)]


def parse(verb: str, *words: str) -> None:
    """Parse a command without running it; raise if the verb, an option or a value is unknown."""
    match verb:
        case "run":
            run_command.read_options(run_command.split_words(words), {})
        case "slurm" if words[0] not in ("follow", "status", "cancel"):
            slurm_command.read_words(words)
        case "k8s":
            k8s_command.read_words(words)
        case _:
            COMMANDS[verb].make_context(verb, list(words))


@pytest.mark.parametrize("page", [page for page in PAGES if [*commands_of(page)]], ids=lambda page: page.stem)
def test_documented_commands_are_accepted(page: Path) -> None:
    """Each of the page's commands is parsed; `...` stands for words that are left out."""
    for words in commands_of(page):
        parse(*(word.replace("$SLURM_NNODES", "2").replace("$SLURM_NODEID", "0") for word in words if word != "..."))


@pytest.mark.parametrize(
    "words",
    ["doctor --bogus", "profile train.py --bogus", "run --bogus train.py", "bogus train.py"],
)
def test_a_wrong_command_would_be_noticed(words: str) -> None:
    """An option or a verb that ddpilot does not have fails the test above."""
    with pytest.raises(Exception, match="bogus"):
        parse(*words.split())


def test_commands_are_found() -> None:
    """In blocks of all kinds: with a prompt, within srun, and continued on a second line."""
    found = {" ".join(words) for page in PAGES for words in commands_of(page)}
    assert len(found) > 60
    assert any(words.startswith("profile train.py --nnodes $SLURM_NNODES") for words in found)
    assert {words.split()[0] for words in found} <= set(COMMANDS)
