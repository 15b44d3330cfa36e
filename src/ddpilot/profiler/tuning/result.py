# SPDX-License-Identifier: Apache-2.0
"""`Tuning`: what was tried, what helps and by how much, and the lines to paste. No torch."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from ddpilot.findings.display import screen_size
from ddpilot.profiler.tuning.lines import Change
from ddpilot.profiler.tuning.options import Option
from ddpilot.profiler.tuning.search import LEAST_GAIN, Gain, Trials, Tried, is_beaten, take_first


@dataclass(frozen=True, kw_only=True, repr=False)
class Tuning:
    """The result of `ddpilot tune`. Displays itself in a terminal and in a notebook."""

    title: str
    num_ranks: int
    num_updates: int
    """Updates of each run, at most."""
    trials: Trials
    changes: tuple[Change, ...]
    """The lines to paste; none if nothing helps."""
    advice: tuple[str, ...]
    """Observations whose remedy is not tried, because it changes what is computed."""
    environment: tuple[str, ...]
    """Notes on variables of NCCL that have no effect."""
    estimates: Mapping[str, float]
    """The factors that the profile has estimated, by the code of the finding."""
    wall_s: float

    @property
    def gain(self) -> Gain | None:
        """The measured gain of what helps, in pairs of its own; None if nothing does."""
        return self.trials.winner.gain if self.trials.winner is not None else None

    @property
    def options(self) -> tuple[Option, ...]:
        """The options that help; empty if none does."""
        return self.trials.winner.options if self.trials.winner is not None else ()

    @property
    def update_s(self) -> float:
        """Median duration of an update of the script as it is, over runs; 0.0 if nothing was tried."""
        return statistics.median(self.trials.durations_s) if self.trials.durations_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-serializable values."""
        return {
            "title": self.title,
            "num_ranks": self.num_ranks,
            "num_updates": self.num_updates,
            "num_runs": self.trials.num_runs,
            "wall_s": round(self.wall_s, 1),
            "ended": self.trials.ended,
            "update_s": self.trials.durations_s,
            "tried": [self._tried_to_dict(each) for each in self.trials.tried],
            "together": [self._tried_to_dict(each) for each in self.trials.together],
            "helps": [str(option) for option in self.options],
            "gain": asdict(self.gain) if self.gain is not None else None,
            "changes": [asdict(change) for change in self.changes],
            "warnings": [*self._warnings()],
            "advice": list(self.advice),
            "environment": list(self.environment),
        }

    def _tried_to_dict(self, tried: Tried) -> dict[str, Any]:
        gain = asdict(tried.gain) if tried.gain is not None else None
        if gain is not None and math.isinf(gain["high"]):
            gain |= {"low": None, "high": None}  # of one pair; JSON has no infinity
        return {
            "options": [str(option) for option in tried.options],
            "why": tried.options[0].why,
            "ratios": tried.ratios,
            "update_s": tried.durations_s,
            "gain": gain,
            "estimate": self.estimates.get(tried.options[0].code),
            "verdict": "does not work" if tried.error else tried.verdict,
            "error": tried.error,
        }

    def render(self, *, width: int | None = None) -> str:
        """Return the text: a line for each option, what helps together, and the lines to paste."""
        width = width or screen_size().columns
        blocks = [self._head(), "\n".join(self._table(width)), "\n".join(_wrap(self._conclude(), width))]
        blocks += ["to paste:\n" + "\n".join(map(str, self.changes))] if self.changes else []
        notes = [*self._warnings(), *self.advice, *self.environment]
        blocks.append("\n".join(line for note in notes for line in _wrap(f"note: {note}", width)))
        return "\n\n".join(filter(None, blocks))

    def _head(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        if not self.trials.num_runs:
            return f"{self.title} on {ranks}: nothing was tried"
        base = f"{self.update_s * 1e3:.3g} ms an update as it is; " if self.update_s else ""
        runs = f"{self.trials.num_runs} runs of up to {self.num_updates} updates in {self.wall_s / 60:.1f} min"
        return f"{self.title} on {ranks}: {base}{runs}"

    def _table(self, width: int) -> Iterator[str]:
        tried = self.trials.tried
        if not tried:
            return
        names, gains = [str(each) for each in tried], ["" if each.gain is None else str(each.gain) for each in tried]
        head = "times as fast (95 %)"
        first, second = max(map(len, names)), max(len(head), *map(len, gains))
        yield f"{'tried':<{first}}  {head}"
        for name, gain, each in zip(names, gains, tried, strict=True):
            row = f"{name:<{first}}  {gain:<{second}}  {self._judge(each)}".rstrip()
            yield from _wrap(row, width) if each.error else [row]

    def _judge(self, tried: Tried) -> str:
        if tried.error:
            return f"does not work with this script: {tried.error}"
        if tried.gain is None:
            return "not tried"
        estimate = self.estimates.get(tried.options[0].code, 0.0)
        expected = f" (the profile's estimate: {estimate:.2f}x)" if estimate > 1.0 else ""
        if tried.verdict == "open":
            better = [str(each) for each in self.trials.tried if is_beaten(tried, each)]
            undecided = "not decided" if self.trials.ended else "inside the noise"
            return f"less than {better[-1]}" if better else undecided
        words = {"helps": f"helps{expected}", "slower": "slower", "no gain": f"no gain of {LEAST_GAIN:.0%}"}
        return words[tried.verdict]

    def _conclude(self) -> str:
        trials = self.trials
        ended = f" The trials ended early: {trials.ended}." if trials.ended else ""
        if trials.winner is not None and trials.winner.gain is not None:
            names = " and ".join(map(str, trials.winner.options))
            after_ms = statistics.median(trials.winner.durations_s) * 1e3
            return (
                f"{names}: {trials.winner.gain} of their own, {self.update_s * 1e3:.3g} -> {after_ms:.3g} ms an update."
                f"{ended}"
            )
        known = [each for each in trials.together if each.gain is not None]
        if known:
            last = take_first(known)
            found = f"Nothing helps for sure: {last} helped in trials, and was {last.gain} when it was tried again."
        elif any(each.verdict == "helps" for each in trials.tried):
            best = max((each for each in trials.tried if each.verdict == "helps"), key=lambda each: each.ratios)
            found = f"{best} helped in trials, and was not tried again: no gain is claimed."
        elif not trials.tried:
            found = "Nothing helps: the profile shows nothing that options of DDP, loaders or threads could change."
        elif trials.ended:
            found = "Nothing has helped so far."
        else:
            found = f"Nothing helps: none of the {len(trials.tried)} options gives {LEAST_GAIN:.0%} or more for sure."
        return f"{found}{ended}"

    def _warnings(self) -> Iterator[str]:
        for option in self.options:
            if option.warning:
                yield f"{option} {option.warning}"

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"Tuning({self._conclude()!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.render(width=100))}</pre>"


def _wrap(text: str, width: int) -> Sequence[str]:
    return textwrap.wrap(
        text,
        max(60, width),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
