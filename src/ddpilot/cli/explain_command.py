# SPDX-License-Identifier: Apache-2.0
"""``ddpilot explain``: look up the page of a finding, or of a message that a program printed."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress

from ddpilot._project import page_url
from ddpilot.errors import DdpilotError
from ddpilot.findings.catalog import Entry, all_entries, find_asked, find_entry
from ddpilot.findings.page import WATCHED_TORCHRUN, render_page

_WRONG = (401, 406, 320, 324, 321, 405, 414, 408, 407)
_SUBJECTS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("start", r"init_process_group|init(iali[sz]\w+)?|start(s|ing|up)?|rendezvous", (105, 104, 103, 106, 101)),
    (
        "one GPU",
        r"(only|just) (the )?(one|1|first|gpu 0)\b.*|(one|1|same|first) gpu (is )?(used|busy)|gpu 0 only|gpus? .*idle",
        (118, 324, 119, 330),
    ),
    ("accumulation", r"accumulat\w*|no_sync|micro-?batch(es)?", (505, 323, 328, 727)),
    ("batch norm", r"(sync)?batch[ -]?norm\w*", (408, 501, 307)),
    ("loader", r"data ?loaders?\b.*\bslow\w*|slow\w* .*\bdata ?loaders?|waits? for data", (721, 213, 601)),
    (
        "rank 0 only",
        r"(validat|evaluat|sav)\w*\b.*\brank 0|rank 0\b.*\b(validat|evaluat|sav)\w*|only on rank 0",
        (211, 201, 220),
    ),
    (
        "hang",
        r"hang(s|ing)?|hung|stuck|fr[eo]ez\w*|frozen|deadlock\w*|forever|blocks|blocked|not respond\w*",
        (218, 207, 208, 220, 201, 209, 215, 213),
    ),
    ("timeout", r"time(d)?[ -]?out\w*|watchdog", (218, 209, 105, 104, 207, 220)),
    ("not a number", r"nans?|inf|infinite|infinity|diverg\w+|explod\w+", (409, 414, 501, 325)),
    ("slow", r"slow\w*|speed(up)?|throughput|faster|utili[sz]ation|scaling", (721, 504, 217, 502, 213, 221, 330)),
    ("port", r"ports?|address (already )?in use", (103, 104, 116)),
    ("memory", r"memory|oom|ram|vram", (703, 702, 601, 410, 118, 604)),
    ("killed", r"killed|sigkill|-9|kill -9|signal 9", (702, 607, 601, 703)),
    ("crash", r"crash\w*|segfault\w*|sigsegv|sigabrt|abort\w*|core dump\w*|-11|-6", (707, 202, 203, 606, 607)),
    ("failed", r"torchrun|elastic|exit ?codes?", (701, 702, 707)),
    ("nccl", r"nccl", (704, 107, 108, 218)),
    ("gloo", r"gloo", (106, 209, 202)),
    ("connection", r"connect\w*|refused|reset|closed|unreachable|network|nodes?", (104, 105, 209, 106, 107)),
    ("wrong numbers", r"wrong|accura\w+|worse|different|differs?|not learning|converge\w*|reproducib\w+", _WRONG),
    ("learning rate", r"learning rate|batch size", (414, 823, 406)),
    ("checkpoint", r"checkpoints?|state_?dict|load\w*|sav(e|es|ing)|resum\w+", (602, 603, 608, 609)),
    ("notebook", r"notebooks?|jupyter|colab|kaggle|spawn\w*|fork\w*|pickl\w+", (112, 111, 113, 114, 115)),
    ("time limit", r"time ?limit|wall ?time", (709, 702)),
    ("Slurm", r"slurm|sbatch|srun|requeue\w*|preempt\w*", (102, 101, 104, 709, 702)),
    ("zombie", r"zombies?|orphan\w*|left ?over", (116, 605, 103)),
    ("unused parameters", r"unused|find_unused\w*", (308, 503, 212, 502)),
    ("data", r"dataloader|workers?|samplers?|shuffl\w+|epochs?|batch(es)?", (401, 402, 404, 403, 213, 607, 413)),
)
"""Subjects of plain-word questions: name, pattern of the words, and the numbers of matching pages, likeliest first."""

_FAQ = "docs/faq.md"
_MAX_PLAIN_WORDS = 14
"""Maximum number of words of a question; longer text is treated as a message."""


def explain(words: str, *, color: bool = False) -> str:
    """The page of a code, name or message; for plain words such as "hang" the matching pages; if empty, all pages.

    `color`: use ANSI colors for a page.

    Raises `DdpilotError` if no page matches.
    """
    if not words.strip():
        return f"{list_entries(all_entries())}\n{_by_symptom()}\n"
    if len(words.split()) == 1:
        with suppress(DdpilotError):
            return _page(find_entry(words), color=color)
    known = find_asked(words)
    if not known:
        fitting = find_fitting(words)
        if fitting:
            head = f"Pages that fit {_shorten(words)}, the likeliest first:"
            tail = f"`ddpilot explain {fitting[0].code}` prints one; `ddpilot watch` reports on a job."
            return f"{head}\n\n{list_entries(fitting)}\n{tail}\n"
        if os.path.isfile(words):
            raise DdpilotError(
                f"looking up {_shorten(words)}",
                found="no finding has this name, and a file has",
                fix=f"Read what the file contains: `ddpilot explain - < {shlex.quote(words)}`",
            )
        if re.fullmatch(r"\S+\.(txt|log|out|err)", words.strip()):
            raise DdpilotError(
                f"looking up {_shorten(words)}",
                found="no finding has this name, and no such file exists",
                fix="Give the line that names the error, or a file: `ddpilot explain - < FILE`",
            )
        if len(words.split()) == 1:
            return render_page(find_entry(words), color=color)
        raise DdpilotError(
            "looking up a message",
            found=f"no page matches {_shorten(words)}",
            fix="Give the line that names the error, as it was printed; `ddpilot explain` lists all pages",
        )
    head = ""
    if known[1:] and "\n" in words.strip():
        codes = ", ".join(entry.code for entry in known)
        head = f"The text fits {len(known)} pages: {codes}. This is the first.\n\n"
    return head + _page(known[0], color=color) + _other_pages(known) + _next_step(known[0])


def _other_pages(known: tuple[Entry, ...]) -> str:
    if not known[1:]:
        return ""
    return (
        f"\nThe text also fits:\n\n{list_entries(known[1:])}\n`ddpilot explain {known[1].code}` prints the next page.\n"
    )


def _next_step(entry: Entry) -> str:
    """Return the commands that name the rank and the line, which a message alone does not."""
    if "watch" not in entry.found_by:
        return ""
    return (
        "\nThe message alone does not name the rank and the line that caused it. Start the job again with one of "
        f"these, which do:\n\n    {WATCHED_TORCHRUN}\n    ddpilot run --nproc-per-node 2 train.py\n"
    )


def _page(entry: Entry, *, color: bool) -> str:
    """The page, and its address if the project has one."""
    url = page_url(f"src/ddpilot/findings/pages/{entry.code}.md")
    page = render_page(entry, color=color)
    return f"{page}\n{url}\n" if url else page


def _by_symptom() -> str:
    place = page_url(_FAQ) or _FAQ
    return f"`ddpilot explain hang` lists the pages that fit; {place} has a command for each symptom."


def find_fitting(words: str) -> tuple[Entry, ...]:
    """The pages that match a few plain words, likeliest first; empty for a long text."""
    if len(words.split()) > _MAX_PLAIN_WORDS:
        return ()
    text = words.lower()
    numbers = [
        number
        for _, pattern, pages in _SUBJECTS
        if re.search(rf"(?<![\w-])(?:{pattern})(?!\w)", text)
        for number in pages
    ]
    return tuple(find_entry(f"DDP{number}") for number in dict.fromkeys(numbers))


def list_entries(entries: tuple[Entry, ...]) -> str:
    """One line per entry: code, name, title."""
    width = max(len(entry.name) for entry in entries)
    return "".join(f"{entry.code}  {entry.name:<{width}}  {entry.title}\n" for entry in entries)


def _shorten(words: str) -> str:
    text = " ".join(words.split())
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
