# SPDX-License-Identifier: Apache-2.0
"""`ddpilot explain`: the page of a finding, or of a message that a program printed."""

from __future__ import annotations

from ddpilot.errors import DdpilotError
from ddpilot.findings.catalog import Entry, all_entries, find_entry, find_known


def explain(words: str) -> str:
    """The page of the code or the name `words`, or those of the message that `words` are; of nothing, the list of all.

    Raises `DdpilotError` where there is no such page, or none knows the message.
    """
    if not words.strip():
        return list_entries(all_entries())
    if len(words.split()) == 1:
        return find_entry(words).text
    known = find_known(words)
    if not known:
        raise DdpilotError(
            "looking up a message",
            found=f"no page knows {_shorten(words)}",
            fix="Give the line that names the error, as it was printed; `ddpilot explain` lists all pages",
        )
    more = f"\nAlso possible: {', '.join(f'{entry.code} {entry.name}' for entry in known[1:])}\n" if known[1:] else ""
    return known[0].text + more


def list_entries(entries: tuple[Entry, ...]) -> str:
    """A line for each: code, name, title."""
    width = max(len(entry.name) for entry in entries)
    return "".join(f"{entry.code}  {entry.name:<{width}}  {entry.title}\n" for entry in entries)


def _shorten(words: str) -> str:
    text = " ".join(words.split())
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
