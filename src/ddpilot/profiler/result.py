# SPDX-License-Identifier: Apache-2.0
"""`Profile`: where the time of updates goes, as text, HTML or JSON. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from ddpilot.errors import RecordError
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.display import Findings, screen_size
from ddpilot.profiler.clocks import align_clocks, use_device_clocks
from ddpilot.profiler.judgements.gradients import judge_gradients
from ddpilot.profiler.judgements.host import judge_host, judge_threads
from ddpilot.profiler.judgements.judged import Judged, core_wait_s, ms
from ddpilot.profiler.judgements.ranks import judge_ranks
from ddpilot.profiler.phases import NUM_WARM_UP, SHARES, Phases, divide_updates
from ddpilot.profiler.pictures.figures import plot_profile
from ddpilot.profiler.pictures.profile_page import render_page, render_profile
from ddpilot.profiler.pictures.recorded import MemoryCourse, Timeline, full_lateness, make_memory_course, make_timeline
from ddpilot.profiler.spans_file import HOST_CLOCK, RankTimes, find_ranks, read_times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIX = f"Profile at least {NUM_WARM_UP + 3} updates: steps of an optimizer after a backward pass"
_MAX_SHOWN = 8
"""Ranks that have a column, a bar and a row of their own in a text."""
_SHADES = " .:-=+*#%@"
_LEAST_LATE = 0.05
"""Part of an update by which a rank has to be late for lateness to be shown as text."""
_LEAST_SKEW = 0.1
"""Part of the median duration by which the mean has to differ for both to be shown."""
_LETTERS = {
    "data": "d",
    "copy": "c",
    "forward": "F",
    "backward": "B",
    "waiting": "w",
    "communication": "X",
    "optimizer": "O",
    "checkpoint": "C",
    "evaluation": "E",
    "sync": "S",
    "shadow": "j",
    "other": ".",
}
_ALL_BUSY = 0.20
"""If threads wait this share of the time for a core, other shares are long for that reason, too."""
_BUSY = 0.10
"""If ranks wait this share of the time for a core, other processes use the machine."""
_AFFECTED = ("DDP722", "DDP723", "DDP743", "DDP747")


@dataclass(frozen=True, kw_only=True, repr=False)
class Profile:
    """The profile of a run. Displays itself in a terminal and in a notebook."""

    phases: Phases
    """Seconds of each update in each phase, by rank."""
    judged: tuple[Judged, ...]
    """Findings, with the factor that each would give; the largest first."""
    is_fair: bool = True
    """False if the ranks share cores or a device, so that N of them cannot be N times as fast as one."""
    timeline: Timeline | None = None
    """The spans of a typical update."""
    memory: MemoryCourse | None = None
    """Memory over time."""
    facts: tuple[Mapping[str, Any], ...] = ()
    """Facts that each rank has recorded about the program, by name."""
    num_left_out: tuple[int, ...] = ()
    """Updates that each rank made after the last one of the rank that made fewest. They are in no figure."""

    @property
    def findings(self) -> Findings:
        """What makes updates slow, the most expensive first."""
        return Findings((each.finding for each in self.judged), more="`ddpilot profile --json`", is_ranked=True)

    @property
    def summary(self) -> str:
        """The text of one screen: a table of the phases by rank, a bar for each rank, and the findings."""
        return self.render()

    @property
    def headline(self) -> str:
        """One sentence: number of updates, duration and spread."""
        durations = self.phases.durations_s.mean(axis=0)
        low, high = numpy.percentile(durations, [10, 90])
        first, num = self.phases.first_update, self.phases.seconds.shape[1]
        ranks = f"{len(self.phases.ranks)} rank{'s' * (len(self.phases.ranks) > 1)}"
        return (
            f"{num} updates of {ranks}, from the {_ordinal(first)} on: {self.phases.update_s * 1e3:.3g} ms each "
            f"({low * 1e3:.3g} to {high * 1e3:.3g}{self._mean()}){self._throughput()}{self._clocks()}"
        )

    def _mean(self) -> str:
        """The mean duration, of which the table is, if a few long updates make it differ from the median."""
        mean_s, median_s = self.phases.mean_s, self.phases.update_s
        return f"; {mean_s * 1e3:.3g} on average" if abs(mean_s - median_s) > _LEAST_SKEW * median_s else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the figures, a sentence each."""
        ranks, found = self.phases.ranks, []
        more = [f"{num} of rank {rank}" for rank, num in zip(ranks, self.num_left_out, strict=False) if num]
        if more:
            fewest = ", ".join(str(rank) for rank, num in zip(ranks, self.num_left_out, strict=False) if not num)
            found.append(f"the last updates are left out ({_shorten(more)}), since rank {fewest} made fewer")
        if not self.phases.are_together:
            found.append("updates of the ranks do not correspond, so that waiting is shown as communication")
        if len(ranks) > 1 and not self.phases.share("communication").any() and not self.phases.share("waiting").any():
            found.append("the ranks exchanged nothing in these updates: each trains a model of its own")
        return tuple(found)

    def _clocks(self) -> str:
        error_s = self.phases.clock_error_s
        compared = f"; clocks of nodes compared within {error_s * 1e3:.2g} ms" if error_s else ""
        if self.phases.clock != HOST_CLOCK:
            return f"; times of the {self.phases.clock} device{compared}"
        uses_device = self.facts and self.facts[0].get("uses_device")
        return f"{'; times of the host, which queues work for the device' if uses_device else ''}{compared}"

    def _throughput(self) -> str:
        speed = self.phases.samples_per_s
        return f", {speed:,.0f} samples/s" if speed else ""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-serializable values; seconds of updates are lists [ranks][updates][shares].

        "overlapped": mean seconds of an update by rank, no part of its duration; None if not known.
        """
        overlapped = self.phases.overlapped_s
        return {
            "summary": self.headline,
            "notes": list(self.notes),
            "shares": list(SHARES),
            "ranks": list(self.phases.ranks),
            "clock": self.phases.clock,
            "first_update": self.phases.first_update,
            "seconds": numpy.round(self.phases.seconds, 7).tolist(),
            "overlapped": None if overlapped is None else numpy.round(overlapped, 7).tolist(),
            "findings": [{**each.finding.to_dict(), "factor": each.factor} for each in self.judged],
        }

    def to_html(self, path: str | Path, *, title: str = "Profile") -> None:
        """Write the report with its pictures to `path`: one file, which needs no network."""
        Path(path).write_text(render_page(title, self._repr_html_()), "utf-8")

    def plot(self) -> Figure:
        """Return a matplotlib figure: an update on each rank as a stacked bar, and how late each rank is.

        Raises RecordError if matplotlib is not installed.
        """
        return plot_profile(self.phases, self.headline)

    def render(self, *, width: int | None = None, color: bool = False) -> str:
        """Return the text: a table of the phases by rank, bars, lateness, and the findings; at most one screen."""
        width = width or screen_size().columns
        shown = self._shown_ranks()
        num = len(self.phases.ranks)
        head = "\n".join([self.headline, *(f"note: {each}" for each in self.notes)])
        if len(shown) < num:
            head += f"\n{len(shown)} ranks, from early to late ones:"
        parts = [self._table(shown), self._bars(shown, width), self._lateness(shown, width)]
        blocks = [head, *("\n".join(part) for part in parts if part)]
        height = max(10, screen_size().lines - sum(block.count("\n") + 2 for block in blocks))
        found = self.findings.render(width, color, height=height)
        return "\n\n".join([*blocks, found or "nothing to improve was found"])

    def _shown_ranks(self) -> list[int]:
        """Return places of the ranks that texts show: all, or of many those that wait most to least."""
        num = len(self.phases.ranks)
        if num <= _MAX_SHOWN:
            return list(range(num))
        order = numpy.argsort(-self.phases.share("waiting").mean(axis=1), kind="stable")
        return [int(order[place]) for place in numpy.linspace(0, num - 1, _MAX_SHOWN).round().astype(int)]

    def _table(self, shown: Sequence[int]) -> list[str]:
        names = [name for name in SHARES if self.phases.median(name) > 0]
        head = "ms of an update  " + "".join(f"{f'rank {self.phases.ranks[place]}':>10}" for place in shown)
        lines = [head]
        for name in names:
            seconds = numpy.mean(self.phases.share(name), axis=1)[shown]
            lines.append(f"{_LETTERS[name]} {name:<15}" + "".join(f"{each * 1e3:>10.2f}" for each in seconds))
        overlapped = self.phases.overlapped_s
        if overlapped is not None:
            numbers = "".join(f"{each * 1e3:>10.2f}" for each in overlapped[shown])
            lines += [f"| {'overlapped':<15}{numbers}   (not in the sum)"]
        return lines

    def _bars(self, shown: Sequence[int], width: int) -> list[str]:
        means = self.phases.seconds.mean(axis=1)[shown]
        longest = means.sum(axis=1).max()
        room = max(20, width - 10)
        rows = []
        for place, seconds in zip(shown, means, strict=True):
            ends = numpy.round(numpy.cumsum(seconds) / longest * room).astype(int)
            lengths = numpy.diff(ends, prepend=0)
            bar = "".join(_LETTERS[name] * int(each) for name, each in zip(SHARES, lengths, strict=True))
            rows.append(f"rank {self.phases.ranks[place]:<3} {bar}")
        return rows

    def _lateness(self, shown: Sequence[int], width: int) -> list[str]:
        """Return how late each rank is over the updates, as shades; nothing if no rank is late by much."""
        late = self.phases.arrivals_s
        if numpy.isnan(late).all() or numpy.nanmean(late, axis=1).max() < _LEAST_LATE * self.phases.update_s:
            return []
        most = full_lateness(late)
        columns = numpy.array_split(numpy.arange(late.shape[1]), min(late.shape[1], max(20, width - 10)))
        rows = [
            f"how late to the last collective of an update, by update: `{_SHADES[-1]}` is {most * 1e3:.3g} ms or more"
        ]
        for place in shown:
            means = [float(numpy.nan_to_num(late[place, column]).mean()) for column in columns]
            shades = "".join(_SHADES[min(len(_SHADES) - 1, int(each / most * len(_SHADES)))] for each in means)
            rows.append(f"rank {self.phases.ranks[place]:<3} {shades}".rstrip())
        return rows

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"Profile({self.headline!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))

    def _repr_html_(self) -> str:
        found = self.findings._repr_html_() if self.judged else "<p>Nothing to improve was found.</p>"
        return render_profile(
            self.phases,
            headline=". Note: ".join([self.headline, *self.notes]),
            findings=found,
            timeline=self.timeline,
            memory=self.memory,
        )


def read_profile(folder: Path) -> Profile:
    """Return the profile of the ranks that have recorded into `folder`. Raises RecordError for too few updates."""
    return make_profile([read_times(folder, rank) for rank in find_ranks(folder)])


def make_profile(times: Sequence[RankTimes]) -> Profile:
    """Return the profile of what all ranks have recorded. Raises RecordError if a rank has too few updates."""
    on_device = use_device_clocks(times)
    phases = divide_updates(on_device)
    if phases is None and times and not any(len(each.updates) for each in times):
        raise RecordError("reading a profile", found="too few updates: no rank made one", fix=_FIX)
    if phases is None:
        counts = ", ".join(f"{len(each.updates)} on rank {each.rank}" for each in times) or "no rank has recorded any"
        raise RecordError(
            "reading a profile",
            found=f"too few updates: {counts}",
            fix=_FIX,
        )
    fewest = min(len(each.updates) for each in times)
    return Profile(
        phases=phases,
        judged=judge(phases, times),
        is_fair=_have_own_cores(times),
        timeline=make_timeline(phases, align_clocks(on_device)),
        memory=make_memory_course(times),
        facts=tuple(each.facts for each in times),
        num_left_out=tuple(len(each.updates) - fewest for each in times),
    )


def _have_own_cores(times: Sequence[RankTimes]) -> bool:
    facts = times[0].facts
    if facts.get("uses_device"):
        return bool(facts.get("num_devices", 0) >= facts.get("local_world_size", 1))
    return bool(facts.get("num_cores", 0) >= facts.get("local_world_size", 1))


def _shorten(words: Sequence[str], most: int = 4) -> str:
    return ", ".join([*words[:most], *(["..."] if len(words) > most else [])])


def _ordinal(number: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if 10 <= number % 100 <= 20 else endings.get(number % 10, 'th')}"


def judge(phases: Phases, times: Sequence[RankTimes]) -> tuple[Judged, ...]:
    """Return the causes of slow updates, the largest gain first. `times`: those of the host."""
    of_host = phases if phases.clock == HOST_CLOCK else divide_updates(times) or phases
    found = [*judge_ranks(phases), *judge_gradients(phases, times), *judge_host(phases, of_host, times)]
    threads = judge_threads(times)
    if threads is not None and threads.factor > 1 / (1 - _ALL_BUSY):
        found = [each for each in found if each.finding.code not in _AFFECTED]
    else:
        found = _weigh(found, phases)
    if threads is not None:
        found.append(threads)
    return tuple(sorted(found, key=lambda each: -each.factor))


def _weigh(found: Sequence[Judged], phases: Phases) -> list[Judged]:
    """Return `found`; where ranks wait for a core, with that, and without warnings about what takes less time."""
    wait_s = core_wait_s(phases)
    share = wait_s / phases.mean_s
    if share < _BUSY:
        return list(found)
    more = f"less than the {ms(wait_s)} that a rank waits for a core"
    weighed = [_soften(each, more) if 1 - 1 / each.factor < share else each for each in found]
    summary = (
        f"the ranks share their cores with other processes: one waits {ms(wait_s)} of {ms(phases.mean_s)} for a core"
    )
    return [*weighed, Judged(make_finding("DDP751", summary=summary), 1.0)]


def _soften(each: Judged, more: str) -> Judged:
    finding = replace(each.finding, severity="info", evidence=(*each.finding.evidence, more))
    return Judged(finding, each.factor)
