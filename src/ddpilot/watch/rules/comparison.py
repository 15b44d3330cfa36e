# SPDX-License-Identifier: Apache-2.0
"""The same model and optimizer on several ranks, step by step: do they stay alike, and if not, since when and why."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

from ddpilot.findings.finding import Finding
from ddpilot.record.journal import Entry
from ddpilot.record.log import RankLog
from ddpilot.watch.rules import causes
from ddpilot.watch.rules.causes import Cause
from ddpilot.watch.rules.fingerprints import compare
from ddpilot.watch.rules.moment import Moment, When
from ddpilot.watch.rules.other_reductions import may_be_reduced, num_exchanged
from ddpilot.watch.rules.rule import RuleContext
from ddpilot.watch.rules.telling import tell_divergence

NUM_LOCAL_STEPS = 16
"""Steps without a reduction by DDP that may be meant (local SGD averages parameters from time to time), though nothing
says so: DDP was passed by."""

NUM_FREE_STEPS = 50
"""The same for parameters that no DDP model has, and for steps that are in `no_sync` as a whole."""

NUM_SINGLE_STEPS = 5
"""Steps that one rank takes after reductions that another took part in, which takes none."""

WAIT_NS = 300_000_000
"""How long a rank that has not noted a moment yet is waited for before the others are compared."""

MIN_EXCHANGED = 32
"""Elements of a collective, or of a point-to-point operation, that is no metric: parts of one model in every other step
talk like this."""

_MAX_MOMENTS = 128
_MAX_REDUCED = 3


class Comparison:
    """All that is known of the ranks' units with the same `key`."""

    def __init__(self, key: tuple[Any, ...], context: RuleContext) -> None:
        self.key = key
        self.units: dict[int, dict[str, Any]] = {}
        self.loads: dict[int, Entry] = {}
        self.is_over = False
        """Nothing more is said: it has been, or differences are meant."""
        self._context = context
        self._moments: OrderedDict[When, Moment] = OrderedDict()
        self._waiting: dict[When, Moment] = {}
        self._last: dict[int, When] = {}
        self._order: dict[int, deque[When]] = {}
        self._first_bad: Moment | None = None
        self._began_alike: bool | None = None
        self._is_apart = False
        self._first_ns: dict[int, int] = {}
        self._num_steps = 0
        self._num_local = 0
        self._num_reduced = 0
        self._newest = 0
        self.alike_at = 0
        """The newest step at which parameters were the same on all ranks; 0 where they never were."""

    @property
    def is_free(self) -> bool:
        """Whether no DDP model has these parameters."""
        return bool(self.key[0] == "free")

    def describe(self, rank: int, unit: dict[str, Any]) -> None:
        """What `rank` says of its unit."""
        self.units[rank] = unit

    def loaded(self, rank: int, entry: Entry) -> None:
        """`rank` loaded a state dict into the model after it was wrapped."""
        self.loads[rank] = entry

    def step(self, rank: int, entry: Entry) -> None:
        """`rank` is about to take a step."""
        if self.is_over:
            return
        if entry.values.get("silent"):
            self.end()
            return
        number = entry.values["s"]
        self._newest = max(self._newest, int(entry.values["n"]))
        last = self._last.get(rank, (-1, 0))
        when = (number, last[1] + 1 if last[0] == number else 0)
        self._last[rank] = when
        self._order.setdefault(rank, deque(maxlen=_MAX_MOMENTS)).append(when)
        self._first_ns.setdefault(rank, entry.time_ns)
        moment = self._moments.setdefault(when, Moment())
        moment.steps[rank] = entry
        if "f" in entry.values and not moment.is_compared:
            self._waiting[when] = moment
        if len(self._moments) > _MAX_MOMENTS:
            self._waiting.pop(self._moments.popitem(last=False)[0], None)

    def judge(self, now_ns: int | None) -> Iterator[Finding]:
        """What is new. `now_ns`: None between two looks, when only what all ranks have noted is compared."""
        if self.is_over:
            return
        for moment in self._ready(now_ns):
            finding = self._weigh(moment)
            if finding is not None:
                self.end()
                yield finding
                return
        if now_ns is not None and (finding := self._step_of_some(now_ns)) is not None:
            self.end()
            yield finding

    def finish(self) -> Iterator[Finding]:
        """What is left to say when no rank will take another step."""
        moment = self._first_bad
        if self.is_over or moment is None:
            return
        cause = self._cause(moment)
        num_needed = 2 if self.is_free else 1
        is_known = cause.code != causes.UNKNOWN.code
        if is_known and self._num_steps >= num_needed and not self._is_reduced_otherwise():
            self.end()
            yield self._tell(cause, moment, moment)

    def end(self) -> None:
        """Say nothing more."""
        self.is_over = True
        self._moments.clear()
        self._waiting.clear()
        self._order.clear()

    def _ready(self, now_ns: int | None) -> list[Moment]:
        """Moments of which enough ranks have a fingerprint, oldest first."""
        ready = []
        for when, moment in list(self._waiting.items()):
            num = sum("f" in step.values for step in moment.steps.values())
            is_old = now_ns is not None and now_ns - moment.begun_ns >= WAIT_NS
            if num >= self._num_ranks() or (num >= 2 and is_old):
                moment.is_compared = True
                ready.append(moment)
                del self._waiting[when]
        return ready

    def _num_ranks(self) -> int:
        group = "world" if self.is_free else self.key[1]
        return self._context.world_size if group == "world" else len(group.split(","))

    def _weigh(self, moment: Moment) -> Finding | None:
        """Compare the ranks at `moment`; a finding where that is the proof."""
        fingerprints = {rank: step.values["f"] for rank, step in moment.steps.items() if "f" in step.values}
        names = {rank: self.units[rank]["names"] for rank in fingerprints}
        moment.difference = difference = compare(names, fingerprints)
        self._num_steps += 1
        if self._began_alike is None:
            self._began_alike = not difference.parameters
        if not difference.parameters:
            if self._is_apart and not moment.is_reduced:
                self.end()  # the program makes them equal again by itself, and will next time
                return None
            self._first_bad = moment if difference.gradients else None
            self._num_local = 0
            self.alike_at = self._count(moment)
            at_ns = {rank: step.time_ns for rank, step in moment.steps.items()}
            self.loads = {rank: load for rank, load in self.loads.items() if load.time_ns > at_ns.get(rank, 0)}
            return None
        self._is_apart = True
        self._first_bad = self._first_bad or moment
        self._num_local = max(0, self._count(moment) - self._count(self._first_bad)) + 1
        if self._is_proven(moment):
            cause = self._cause(self._first_bad)
            may_be_meant = cause is causes.NO_SYNC and not moment.is_reduced
            return self._tell(cause, self._first_bad, moment, may_be_meant=may_be_meant)
        return None

    def _count(self, moment: Moment) -> int:
        return max(int(step.values["n"]) for step in moment.steps.values())

    def _is_proven(self, moment: Moment) -> bool:
        if self.is_free:
            return (
                self._num_local >= NUM_FREE_STEPS
                and self._cause(self._first_bad or moment) is causes.NEVER_WRAPPED
                and not self._is_reduced_otherwise()
            )
        if moment.is_reduced:
            return True
        # Whole rounds in no_sync are how local SGD is written; they may be long.
        is_asked_for = self._cause(self._first_bad or moment) is causes.NO_SYNC
        needed = NUM_FREE_STEPS if is_asked_for else NUM_LOCAL_STEPS
        return self._num_local >= needed and not self._is_reduced_otherwise()

    def _cause(self, moment: Moment) -> Cause:
        if self.is_free:
            is_one_model = self._began_alike and bool(moment.difference.gradients)
            return causes.NEVER_WRAPPED if is_one_model and not moment.rates else causes.UNKNOWN
        differing = {*moment.difference.gradients} or {*moment.difference.parameters}
        moved = {name.partition(":")[0] for unit in self.units.values() for name in unit["moved"]}
        late = {unit["names"][place] for unit in self.units.values() for place in unit["late"]}
        if moved & differing:
            return causes.MOVED
        if differing <= late:
            return causes.LATE
        if not moment.difference.gradients:
            if self._skipped():
                return causes.STEP
            if moment.rates:
                return causes.RATES
            return causes.CHANGED if self.alike_at and not self.loads else causes.PARAMETERS
        whys = [moment.value(rank, "why") for rank in moment.steps]
        return next((causes.LOCAL[why] for why in whys if why), causes.UNKNOWN)

    def _skipped(self) -> dict[int, When]:
        """Ranks that took no step where another did and both went on; with the first such moment."""
        found: dict[int, When] = {}
        begun = max((order[0] for order in self._order.values()), default=(0, 0))
        ended = min((order[-1] for order in self._order.values()), default=(0, 0))
        taken = {rank: set(order) for rank, order in self._order.items()}
        for when in sorted(set().union(*taken.values())):
            if begun <= when <= ended:
                for rank in taken:
                    if when not in taken[rank]:
                        found.setdefault(rank, when)
        return found

    def _step_of_some(self, now_ns: int) -> Finding | None:
        """Ranks that never took a step with an optimizer that others have taken several with."""
        if self.is_free or not self._order:
            return None
        group = range(self._context.world_size) if self.key[1] == "world" else _ranks(self.key[1])
        steps = [moment for moment in self._moments.values() if moment.is_reduced]
        if len(self._order) >= len(group) or len(steps) < NUM_SINGLE_STEPS:
            return None
        # The others have taken part in the reductions before all steps but the last; their notes may come late.
        if now_ns - steps[0].begun_ns < WAIT_NS or self._is_reduced_otherwise():
            return None
        self._skippers = tuple(rank for rank in group if rank not in self._order)
        return self._tell(causes.STEP, steps[0], steps[-1])

    _skippers: tuple[int, ...] = ()

    def _is_reduced_otherwise(self) -> bool:
        """Whether other collectives may have averaged what DDP did not; also where that is not known."""
        largest = max(unit["largest"] for unit in self.units.values())
        since = self._first_bad.steps if self._first_bad else {}
        logs = {rank: log for rank in self._order if (log := self._context.log(rank)) is not None}
        if not logs or (self._context.has_all_logs and len(logs) < len(self._order)):
            return self.is_free or not self._context.has_all_logs
        for rank, log in logs.items():
            since_ns = since[rank].time_ns if rank in since else self._first_ns[rank]
            if may_be_reduced(log, since_ns, largest) or self._talks(log, since_ns):
                self._num_reduced += 1
                if self._num_reduced >= _MAX_REDUCED:
                    self.end()  # it is meant so, and asking takes time
                return True
        return False

    def _talks(self, log: RankLog, since_ns: int) -> bool:
        """Whether these are parts of one model: in every other step or more the program exchanges what they compute."""
        if not self.is_free:
            return False
        num_steps = self._newest - (self._count(self._first_bad) if self._first_bad else 0)
        return 2 * num_exchanged(log, since_ns, MIN_EXCHANGED) >= max(2, num_steps)

    def _tell(self, cause: Cause, first: Moment, proof: Moment, *, may_be_meant: bool = False) -> Finding:
        skipped: Sequence[int] = self._skippers or (tuple(self._skipped()) if cause is causes.STEP else ())
        return tell_divergence(cause, self, first, proof, skipped=tuple(skipped), may_be_meant=may_be_meant)


def _ranks(group: str) -> list[int]:
    return [int(rank) for rank in group.split(",")] if " " not in group else []
