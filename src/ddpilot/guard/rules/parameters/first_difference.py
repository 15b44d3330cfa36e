# SPDX-License-Identifier: Apache-2.0
"""Compare one model and optimizer on several ranks step by step; report since when and why they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.notes import LOCAL_STEPS, NO_GROUP, ParameterSetNote, Site
from ddpilot.guard.rules.parameters import causes
from ddpilot.guard.rules.parameters.causes import Cause
from ddpilot.guard.rules.parameters.fingerprint_comparison import compare
from ddpilot.guard.rules.parameters.manual_averaging import (
    MIN_EXCHANGED,
    Averaged,
    find_averaging,
    is_meant_apart,
    is_never_exchanged,
    make_changed_finding,
    make_left_out_finding,
    make_unlike_finding,
    may_be_reduced,
    mentions_group,
    num_exchanged,
)
from ddpilot.guard.rules.parameters.steps import WAIT_NS, MatchedStep, MatchedSteps, Skipped
from ddpilot.guard.rules.rule import ByRank, Pass, RuleContext, num_ranks_of, place_of, ranks_of
from ddpilot.record.flight_ring.log import CallSite, RankLog
from ddpilot.record.journal import Entry

NUM_FREE_STEPS = 50
"""Like `LOCAL_STEPS`, for parameters without a DDP model, and if all steps are in `no_sync`."""

NUM_SINGLE_STEPS = 5
"""Steps that some ranks take, after reductions by all ranks, before missing steps of other ranks are reported."""

NUM_STEPS_BEFORE_GROUP = 500
"""Like `NUM_FREE_STEPS`, without a process group, if the program's source has one: it may be created later."""

NUM_COPIES = 5
"""Checked steps that are equal on all ranks after which copies are reported at the end, without a process group."""

NUM_UNLIKE = 5
"""Consecutive checked steps with equal gradients and different weights after which the weights are reported."""

_MAX_REDUCED = 3
"""After this many checks that found averaging without DDP, it counts as intended."""

_MAX_SEARCHES = 8
"""Maximum number of logs searched for averaging by the program; each search takes milliseconds."""


class Comparison:
    """Compares the parameter sets with the same `key` on all ranks. `all_of_job` returns all comparisons."""

    def __init__(
        self, key: tuple[Any, ...], context: RuleContext, all_of_job: Callable[[], Iterable[Comparison]] = tuple
    ) -> None:
        self.key = key
        self._all_of_job = all_of_job
        self.sets: dict[int, ParameterSetNote] = {}
        """The newest description of the parameters, by rank."""
        self.loads: dict[int, Entry] = {}
        """The newest notes of ranks that changed the model after it was wrapped."""
        self.is_over = False
        """True if nothing more is reported: there was a finding, or differences are intended."""
        self._context = context
        self.steps = MatchedSteps()
        self._passes: ByRank[Pass, int] = ByRank(64)
        self._last: dict[int, tuple[MatchedStep | None, Entry]] = {}
        self._first_bad: MatchedStep | None = None
        self._began_alike: bool | None = None
        self._is_apart = False
        self._has_own_gradients = False
        self._num_steps = 0
        self._num_local = 0
        self._num_reduced = 0
        self._num_searches = 0
        self._num_unlike = 0
        self._never_exchanges: bool | None = None
        self._has_group_later: bool | None = None
        self._compared: MatchedStep | None = None
        self.alike_at = 0
        """The newest step at which parameters were the same on all ranks; 0 if they never were."""

    @property
    def is_free(self) -> bool:
        """True if no DDP model has these parameters."""
        return bool(self.key[0] == "free")

    @property
    def is_without_group(self) -> bool:
        """True if the ranks step without a process group: nothing of torch can average their gradients."""
        return self.is_free and str(self.key[1]).partition("/")[0] == NO_GROUP

    def step(self, rank: int, entry: Entry) -> None:
        """Add a step that `rank` is about to take."""
        if self.is_over:
            return
        if entry.values.get("why_silent"):
            self.end()
            return
        self.steps.add(rank, entry, self.sets[rank])

    def begin_pass(self, rank: int, key: Pass) -> None:
        """Note that `rank` starts a pass over a loader."""
        self._passes.put(key, rank, self.steps.num_of.get(rank, 0))

    def find_uneven_pass(self) -> dict[int, int]:
        """Return by rank the number of steps before the first pass that did not begin at the same step on all ranks.

        Ignores passes that all began before parameters were last equal; empty if there is none.
        """
        uneven = (begun for begun in self._passes.values() if len({*begun.values()}) > 1)
        return next((begun for begun in uneven if max(begun.values()) >= self.alike_at), {})

    def last(self, rank: int, entry: Entry) -> Finding | None:
        """Add a sample of the parameters before the newest, possibly last, step of `rank`; compare once complete."""
        self._last[rank] = (self.steps.newest_of(rank), entry)
        if self.is_over or len(self._last) < self._num_ranks():
            return None
        lasts = {rank: last for rank, (_, last) in self._last.items()}
        matched = self._last[rank][0]
        are_matched = all(other is matched for other, _ in self._last.values())
        if matched is None or not are_matched or len({last.values["step"] for last in lasts.values()}) > 1:
            return None
        self._last.clear()
        return self._compare_last(matched, lasts)

    def find(self, now_ns: int | None) -> Finding | None:
        """Return a new finding. `now_ns`: None to compare only steps that all ranks have noted."""
        if self.is_over:
            return None
        for matched in self.steps.take_ready(self._num_ranks(), now_ns):
            if finding := self._compare(matched):
                return finding
        return self._find_skipping_ranks(now_ns) if now_ns is not None else None

    def finish(self) -> Finding | None:
        """Return the remaining finding when no rank will take another step."""
        first = self._first_bad
        if self.is_over:
            return None
        if first is None and self._compared is not None and self._num_steps >= NUM_COPIES:
            return self._copies(self._compared, at_end=True)
        if first is None or self._num_steps < (2 if self.is_free else 1):
            return None
        if finding := self._left_out(at_end=True):
            return finding
        cause = self._cause(first)
        if cause.code == causes.UNKNOWN.code or self._is_reduced_otherwise():
            return None
        return self._make_finding(cause, first, first)

    def end(self) -> None:
        """Stop the comparison and free its state."""
        self.is_over = True
        self.steps.clear()
        self._last.clear()

    def _num_ranks(self) -> int:
        return num_ranks_of("world" if self.is_free else self.key[1], self._context.world_size)

    def _compare(self, matched: MatchedStep) -> Finding | None:
        """Compare the ranks at `matched`; return a finding if it proves a divergence."""
        fingerprints = matched.fingerprints
        names = {rank: matched.sets[rank]["names"] for rank in fingerprints}
        matched.difference = difference = compare(names, fingerprints)
        self._compared = matched
        self._num_steps += 1
        self._has_own_gradients |= bool(difference.gradients)
        if self._began_alike is None:
            self._began_alike = not difference.parameters
        if self.is_free and (finding := self._unlike(matched) or self._copies(matched)):
            return finding
        if not difference.parameters:
            if self._is_apart and not matched.is_reduced:
                self.end()  # the program makes them equal again itself, and will do so next time
                return None
            self._first_bad = matched if difference.gradients else None
            self._num_local = 0
            self.alike_at = self._count(matched)
            at_ns = {rank: step.time_ns for rank, step in matched.steps.items()}
            self.loads = {rank: load for rank, load in self.loads.items() if load.time_ns > at_ns.get(rank, 0)}
            return None
        self._is_apart = True
        self._first_bad = self._first_bad or matched
        self._num_local = max(0, self._count(matched) - self._count(self._first_bad)) + 1
        if finding := self._left_out():
            return finding
        if self._is_proven(matched):
            cause = self._cause(self._first_bad)
            may_be_meant = cause is causes.NO_SYNC and not matched.is_reduced
            return self._make_finding(cause, self._first_bad, matched, may_be_meant=may_be_meant)
        return None

    def _compare_last(self, matched: MatchedStep, lasts: dict[int, Entry]) -> Finding | None:
        """Return a finding if parameters that were equal at an earlier step differ in the sample of the last one.

        DDP, or the program itself, must have averaged the gradients of the last step. Equal samples prove nothing: they
        are a small part of the parameters.
        """
        is_apart = not self.is_free and (self._is_apart or not matched.is_reduced)
        if not self.alike_at or is_apart or matched.steps.keys() != {*lasts}:
            return None
        names = {
            rank: [matched.sets[rank]["names"][at] for at in last.values["places"]] for rank, last in lasts.items()
        }
        fingerprints = {rank: last.values["fingerprint"] for rank, last in lasts.items()}
        difference = compare(names, fingerprints, of="of some elements ")
        if not difference.parameters:
            return None
        line = self._find_own_averaging(matched) if self.is_free else None
        if self.is_free and line is None:
            return None
        matched.difference = difference
        if line is not None:
            return make_changed_finding(causes.CHANGED_AT_END, matched, line, self.alike_at)
        first = self._first_bad or matched
        cause = self._cause(first)
        return self._make_finding(causes.CHANGED_AT_END if cause is causes.CHANGED else cause, first, matched)

    def _count(self, matched: MatchedStep) -> int:
        return max(note["step"] for note in matched.notes.values())

    def _is_proven(self, matched: MatchedStep) -> bool:
        if self.is_free:
            return (
                self._num_local >= self._num_free_steps()
                and self._cause(self._first_bad or matched).code == causes.NEVER_WRAPPED.code
                and not self._is_reduced_otherwise()
            )
        if matched.is_reduced:
            return True
        # Local SGD is written with all steps in no_sync, possibly many of them.
        is_explicit = self._cause(self._first_bad or matched) is causes.NO_SYNC
        needed = NUM_FREE_STEPS if is_explicit else LOCAL_STEPS
        return self._num_local >= needed and not self._is_reduced_otherwise()

    def _num_free_steps(self) -> int:
        """Return fewer steps if the program discarded a DDP wrapper, or if nothing in its source exchanges anything."""
        if self.is_without_group:
            return self._num_steps_without_group()
        if self._num_local < LOCAL_STEPS:
            return LOCAL_STEPS
        if self._never_exchanges is None:
            is_dropped = any(note["dropped"] for note in self.sets.values())
            self._never_exchanges = is_dropped or is_never_exchanged(self._files(), self._context.sources())
        return LOCAL_STEPS if self._never_exchanges else NUM_FREE_STEPS

    def _num_steps_without_group(self) -> int:
        """Return more steps if the program's source has a process group, which it may create later."""
        if self._has_group_later is None:
            self._has_group_later = mentions_group(self._files(), self._context.sources())
        return NUM_STEPS_BEFORE_GROUP if self._has_group_later else LOCAL_STEPS

    def _files(self) -> set[str]:
        """Return the files of the lines that step the optimizer and wrap the model."""
        return {site.get("file", "") for note in self.sets.values() for site in (note["site"], note["made"])}

    def _is_one_model(self, matched: MatchedStep) -> bool:
        """True if no DDP model has these parameters, which began equal and got different gradients.

        Without a process group and without a seed, they may have begun different.
        """
        has_differed = bool(matched.difference.gradients) and not (matched.rates or matched.settings)
        if not (self.is_free and has_differed and (self._began_alike or self._is_unseeded())):
            return False
        return not (self.is_without_group and is_meant_apart(self._files(), self._context.sources()))

    def _is_unseeded(self) -> bool:
        """True if ranks without a process group have different weights because the program sets no seed."""
        return self.is_without_group and not any(note["is_seeded"] for note in self.sets.values())

    def averaged(self) -> Averaged | None:
        """Return the parameters that were equal at the newest comparison; None if there was none."""
        return Averaged(self._compared) if self.is_free and self._compared else None

    def _copies(self, matched: MatchedStep, *, at_end: bool = False) -> Finding | None:
        """Return the finding if ranks without a process group train the same model on the same batches."""
        is_same = not (self._is_apart or self._has_own_gradients or matched.difference.parameters or matched.rates)
        if not (self.is_without_group and is_same and (at_end or self._count(matched) >= self._num_free_steps())):
            return None
        return None if self._is_grouped_elsewhere() else self._make_finding(causes.COPIES, matched, matched)

    def _left_out(self, *, at_end: bool = False) -> Finding | None:
        """Return the finding if the program averages gradients itself and omits some; searches only a few times."""
        first, last = self._first_bad, self._compared
        own = self.averaged()
        if own is None or first is None or last is None or not self._is_one_model(first):
            return None
        needed = LOCAL_STEPS if own.least else NUM_FREE_STEPS
        if not last.difference.parameters or (self._num_local < needed and not at_end):
            return None
        others = [] if own.least else [each.averaged() for each in self._all_of_job() if each is not self]
        averaged = [each for each in (own, *others) if each is not None and each.least]
        line = self._find_averaging(last, averaged)
        return make_left_out_finding(first, last, line) if line else None

    def _find_averaging(self, matched: MatchedStep, averaged: Sequence[Averaged]) -> CallSite | None:
        """Return the line at which the program averages these gradients before the step at `matched`."""
        for rank, step in matched.steps.items() if averaged and self._num_searches < _MAX_SEARCHES else ():
            since_ns = self.steps.previous_ns(rank, step.time_ns)
            if since_ns is not None and (log := self._context.log(rank)) is not None:
                self._num_searches += 1
                return find_averaging(log, since_ns, step.time_ns, averaged)
        return None

    def _unlike(self, matched: MatchedStep) -> Finding | None:
        """Return the finding if the program averages gradients itself and the weights differ check after check."""
        if matched.difference.gradients or not matched.difference.parameters:
            self._num_unlike = 0
            return None
        self._num_unlike += 1
        if self._num_unlike < NUM_UNLIKE:
            return None
        line = self._find_own_averaging(matched)
        if line is not None and self.alike_at:
            return make_changed_finding(causes.CHANGED, matched, line, self.alike_at)
        return make_unlike_finding(matched, line, self._num_unlike) if line else None

    def _find_own_averaging(self, matched: MatchedStep) -> CallSite | None:
        """Return the line at which the program averages all gradients, if they were the same at every check."""
        compared = self._compared
        if compared is None or (self._began_alike and self._has_own_gradients):
            return None
        own = Averaged(compared, are_weights_apart=True)
        return self._find_averaging(matched, [own]) if own.least else None

    def _cause(self, matched: MatchedStep) -> Cause:
        if self.is_free:
            if not self._is_one_model(matched):
                return causes.UNKNOWN
            if any(note["dropped"] for note in self.sets.values()):
                return causes.DROPPED
            return causes.NO_GROUP if self.is_without_group else causes.NEVER_WRAPPED
        differing = {*matched.difference.gradients} or {*matched.difference.parameters}
        moved = {name.partition(":")[0] for note in self.sets.values() for name in note["moved"]}
        late = {note["names"][place] for note in self.sets.values() for place in note["late"]}
        if moved & differing:
            return causes.MOVED
        if differing <= late:
            return causes.LATE
        if not matched.difference.gradients:
            if self.steps.find_skipped():
                return causes.STEP
            if matched.settings:
                return causes.SETTINGS
            if matched.rates:
                return causes.RATES
            if not self.alike_at or self.loads:
                return causes.PARAMETERS
            return causes.EPOCHS if self.find_uneven_pass() else causes.CHANGED
        whys = (note.get("why_local") for note in matched.notes.values())
        if why := next((why for why in whys if why), ""):
            return causes.LOCAL[why]
        events = [note["events"] for note in matched.notes.values()]
        has_backward = any(event in text for text in events for event in "BbR")
        return causes.UNKNOWN if has_backward or not any(events) else causes.NO_BACKWARD

    def _find_skipping_ranks(self, now_ns: int) -> Finding | None:
        """Return the finding for ranks that took no step with an optimizer while other ranks took several."""
        taken = self.steps.num_of.keys()
        if self.is_free or not taken:
            return None
        group = ranks_of(self.key[1], self._context.world_size)
        steps = [matched for matched in self.steps if matched.is_reduced]
        if len(taken) >= len(group) or len(steps) < NUM_SINGLE_STEPS:
            return None
        # The other ranks took part in the reductions before all but the last step; their notes may be late.
        if now_ns - steps[0].begun_ns < WAIT_NS or self._is_reduced_otherwise():
            return None
        absent = tuple(rank for rank in group if rank not in taken)
        skipped = Skipped(steps[0].number, tuple(steps[0].steps), absent)
        return self._make_finding(causes.STEP, steps[0], steps[-1], skipped=skipped)

    def _is_reduced_otherwise(self) -> bool:
        """True if other collectives may have averaged what DDP did not, or if that is unknown."""
        if self.is_without_group:
            return self._is_grouped_elsewhere()
        largest = max(note["largest"] for note in self.sets.values())
        since = self._first_bad.steps if self._first_bad else {}
        first_ns = self.steps.first_ns
        logs = {rank: log for rank in first_ns if (log := self._context.log(rank)) is not None}
        if not logs or (self._context.has_all_logs and len(logs) < len(first_ns)):
            return self.is_free or not self._context.has_all_logs
        for rank, log in logs.items():
            since_ns = since[rank].time_ns if rank in since else first_ns[rank]
            if may_be_reduced(log, since_ns, largest) or self._exchanges_often(log, since_ns):
                self._num_reduced += 1
                if self._num_reduced >= _MAX_REDUCED:
                    self.end()  # it is intended, and checking takes time
                return True
        return False

    def _is_grouped_elsewhere(self) -> bool:
        """True if ranks that step without a process group have one before or after, as for a calibration at the end."""
        if any(not each.is_without_group for each in self._all_of_job()):
            return True
        return any(log.num_begun for rank in self.steps.first_ns if (log := self._context.log(rank)) is not None)

    def _exchanges_often(self, log: RankLog, since_ns: int) -> bool:
        """True if the ranks hold parts of one model, whose results they exchange in at least every second step."""
        if not self.is_free:
            return False
        num_steps = self.steps.newest - (self._count(self._first_bad) if self._first_bad else 0)
        return 2 * num_exchanged(log, since_ns, MIN_EXCHANGED) >= max(2, num_steps)

    def _make_finding(
        self,
        cause: Cause,
        first: MatchedStep,
        proof: MatchedStep,
        *,
        skipped: Skipped | None = None,
        may_be_meant: bool = False,
    ) -> Finding:
        """Build the finding for `cause`: gradients or steps first differed at `first`, parameters at `proof`.

        `skipped`: the step that some ranks did not take, if that is the cause and it is not the first such step.
        """
        if cause is causes.STEP:
            skipped = skipped or self.steps.find_skipped()
        loaded = tuple(sorted(self.loads)) if cause is causes.PARAMETERS else ()
        if len(loaded) == len(first.steps):
            loaded = ()
        left_out = skipped.ranks if skipped is not None else ()
        return make_finding(
            cause.code,
            severity="warning" if may_be_meant else None,
            summary=_summary(cause, first, proof, skipped),
            ranks=left_out or loaded or proof.difference.ranks or first.difference.ranks or tuple(sorted(first.steps)),
            line=place_of(_site(cause, self, first, proof)),
            evidence=tuple(_evidence(cause, self, first, proof)),
            why=cause.why,
            fix=cause.fix,
        )


_EVENTS = {"F": "forward", "f": "forward in no_sync", "B": "backward", "b": "backward in no_sync", "R": "backward"}
_MAX_NAMED = 3


def _summary(cause: Cause, first: MatchedStep, proof: MatchedStep, skipped: Skipped | None) -> str:
    if skipped is not None:
        others, ranks = render_ranks(skipped.taken_by), render_ranks(skipped.ranks)
        return f"step {skipped.number}: {others} called optimizer.step(), {ranks} did not"
    if cause is causes.NO_GROUP:
        return f"{render_ranks(proof.steps)} train separate models, without a process group"
    if cause is causes.COPIES:
        same = f"parameters and gradients are the same at step {proof.number}"
        return f"{render_ranks(proof.steps)} repeat the same training, without a process group: {same}"
    if first.difference.gradients:
        return f"gradients differ between ranks at step {first.number}" + (
            f", parameters at step {proof.number}" if proof.difference.parameters else ""
        )
    what = f"parameters differ between ranks before step {proof.number}"
    return f"{what}, gradients do not" if first.is_seen else f"{what}, the last"


def _evidence(cause: Cause, comparison: Comparison, first: MatchedStep, proof: MatchedStep) -> list[str]:
    lines = []
    if first.difference.gradients:
        lines += _name_some("gradient of", first.difference.gradients, first)
    if proof.difference.parameters:
        lines += _name_some("parameter", proof.difference.parameters, proof)
    if cause is causes.NO_SYNC:
        sites = {str(place_of(site)) for note in first.notes.values() if (site := note.get("local_site"))}
        lines += [f"no_sync() at {site}" for site in sorted(sites)]
    lines += _format_events({rank: note["events"] for rank, note in sorted(first.notes.items()) if note["events"]})
    parameters = next(iter(comparison.sets.values()))
    if cause is causes.MOVED:
        lines += parameters["moved"][:_MAX_NAMED]
    if parameters["made"]:
        lines.append(f"wrapped in DDP at {place_of(parameters['made'])}")
    for rank, entry in sorted(comparison.loads.items()):
        if cause is causes.PARAMETERS:
            what = "changed parameters by apply" if entry.values["by"] == "apply" else "loaded a state dict"
            lines.append(f"rank {rank} {what} at {place_of(entry.values['site'])}")
    if cause is causes.RATES:
        shown = list(first.rates.items())[:8]
        lines += [f"rank {rank}: lr {', '.join(f'{rate:g}' for rate in rates)}" for rank, rates in shown]
    if cause is causes.SETTINGS:
        differing = list(first.settings.items())[:8]
        lines += [f"rank {rank}: {', '.join(map(' '.join, each.items()))}" for rank, each in differing]
    if cause is causes.EPOCHS:
        begun = sorted(comparison.find_uneven_pass().items())[:8]
        lines.append("an epoch began after " + ", ".join(f"{number} steps on rank {rank}" for rank, number in begun))
    if cause in (causes.CHANGED, causes.CHANGED_AT_END):
        lines.append(f"parameters were the same on all ranks before step {comparison.alike_at}")
    lines.append(f"optimizer steps at {place_of(parameters['site'])}")
    return lines


def _name_some(what: str, lines: Mapping[str, str], matched: MatchedStep) -> list[str]:
    named = [
        f"step {matched.number}: {name if name.startswith(f'{what} ') else f'{what} {name}'}: {line}"
        for name, line in list(lines.items())[:_MAX_NAMED]
    ]
    rest = len(lines) - _MAX_NAMED
    return [*named, f"and {rest} more"] if rest > 0 else named


def _format_events(events: Mapping[int, str]) -> list[str]:
    alike: dict[str, list[int]] = {}
    for rank, text in events.items():
        alike.setdefault(text, []).append(rank)
    return [
        f"before it, {render_ranks(ranks)}: {', '.join(_EVENTS[event] for event in text[-8:])}"
        for text, ranks in alike.items()
    ]


def _site(cause: Cause, comparison: Comparison, first: MatchedStep, proof: MatchedStep) -> Site:
    """Return the line to look at first."""
    parameters = next(iter(comparison.sets.values()))
    site: Site = {}
    if cause is causes.PARAMETERS:
        loads = [entry.values["site"] for _, entry in sorted(comparison.loads.items())]
        site = loads[0] if loads else parameters["made"]
    elif cause in causes.LOCAL.values():
        # The line of a call that bypasses DDP may be known only from the second call on.
        notes = [note for matched in (proof, first) for _, note in sorted(matched.notes.items())]
        known = {note.get("why_local") for note in first.notes.values()} - {None}
        for note in notes:
            if note.get("why_local") in known:
                site = note.get("site", {}) if note["why_local"] == "no_sync" else note.get("local_site", {})
                break
    elif cause is causes.DROPPED:
        site = next((note["dropped"] for note in comparison.sets.values() if note["dropped"]), {})
    elif cause in (causes.LATE, causes.MOVED):
        site = parameters["made"]
    return site or parameters["site"]
