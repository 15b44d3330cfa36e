# SPDX-License-Identifier: Apache-2.0
"""Find how models differ that ranks wrap in DDP together, from guard's notes before the constructor failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddpilot.errors import list_names
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.user_files import CodeLine
from ddpilot.watch.explain.missed_collective import Cause
from ddpilot.watch.explain.text import place_of, render_place, render_table
from ddpilot.watch.snapshot.model import JobSnapshot

_MESSAGES = ("DDP expects same model across all ranks", "of the same param in process 0")
_MAX_NAMED = 4
_Parameters = Mapping[str, tuple[Any, str, bool]]
"""By name: shape, dtype, and True if it requires gradients."""


def explain_wraps(job: JobSnapshot) -> Finding | None:
    """Return the finding if DDP rejected models because they differ; None if guard noted no difference."""
    errors = [seen.error.message for seen in job.ranks.values() if seen.error is not None]
    if not any(message in error for error in errors for message in _MESSAGES):
        return None
    found = find_wrap_difference(job)
    if found is None:
        return None
    cause, lines = found
    rows = [(rank, "in DDP's constructor", render_place(line)) for rank, line in lines.items()]
    return make_finding(
        cause.code,
        ranks=cause.ranks,
        line=place_of(lines[cause.ranks[0]]),
        evidence=render_table(rows),
        why=cause.why,
    )


def find_wrap_difference(job: JobSnapshot) -> tuple[Cause, Mapping[int, CodeLine | None]] | None:
    """Compare the models that ranks wrapped last, after the same number of collectives of one group; None if equal.

    Also returns where each rank wraps its model. Of two ranks, the second is the one that differs.
    """
    notes = {rank: note for rank, seen in job.ranks.items() if (note := _newest(seen.journal)) is not None}
    keys = {rank: (note["group"], note["at"]) for rank, note in notes.items()}
    together = max((sorted(r for r in keys if keys[r] == key) for key in keys.values()), key=len, default=[])
    if len(together) < 2 or any(len(notes[rank]["parameters"]) < notes[rank]["num_parameters"] for rank in together):
        return None
    models = {rank: _parameters(notes[rank]) for rank in together}
    lines = {rank: _line_of(notes[rank]["site"]) for rank in together}
    for code, ask in _ASPECTS:
        values = {rank: ask(model) for rank, model in models.items()}
        if any(each != values[together[0]] for each in values.values()):
            usual = max(together, key=lambda rank: (sum(values[rank] == each for each in values.values()), -rank))
            odd = tuple(rank for rank in together if values[rank] != values[usual])
            why = _describe_difference(code, usual, models[usual], odd[0], models[odd[0]])
            return Cause(code=code, ranks=odd, why=why), lines
    return None


def _newest(journal: tuple[Any, ...]) -> Mapping[str, Any] | None:
    return next((note.values for note in reversed(journal) if note.kind == "wrapping"), None)


def _parameters(note: Mapping[str, Any]) -> _Parameters:
    return {name: (tuple(shape), dtype, trains) for name, shape, dtype, trains in note["parameters"]}


def _line_of(site: Mapping[str, Any]) -> CodeLine | None:
    if not site.get("file"):
        return None
    return CodeLine(site["file"], site["line"], site.get("function", ""), site.get("text", ""))


_ASPECTS: tuple[tuple[str, Callable[[_Parameters], Any]], ...] = (
    ("DDP301", lambda model: list(model)),
    ("DDP302", lambda model: [shape for shape, _, _ in model.values()]),
    ("DDP304", lambda model: [trains for _, _, trains in model.values()]),
    ("DDP303", lambda model: [dtype for _, dtype, _ in model.values()]),
)


def _show(names: list[str]) -> str:
    return list_names([f"`{name}`" for name in names], _MAX_NAMED)


def _describe_difference(code: str, one: int, first: _Parameters, other: int, second: _Parameters) -> str:
    here, there = render_ranks([one]), render_ranks([other])
    if code == "DDP301":
        more = {here: [name for name in first if name not in second], there: [n for n in second if n not in first]}
        own = [f"only {who} has {_show(names)}" for who, names in more.items() if names]
        return "; ".join(own) or f"{here} and {there} have the same parameters in a different order"
    at = {"DDP302": 0, "DDP303": 1, "DDP304": 2}[code]
    different = [name for name in first if first[name][at] != second[name][at]]
    if code == "DDP304":
        frozen = [name for name in different if not second[name][2]]
        where, but_not, names = (there, here, frozen) if frozen else (here, there, different)
        return f"{_show(names)} {'is' if len(names) == 1 else 'are'} frozen on {where} but not on {but_not}"
    name = different[0]
    values = [list(model[name][0]) if at == 0 else model[name][1] for model in (first, second)]
    return f"`{name}` is {values[0]} on {here} and {values[1]} on {there}"
