# SPDX-License-Identifier: Apache-2.0
"""Uses of DDP, or of alternatives to it, that cost time or have no effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.rule import BoundedDict, PromptRule, RuleContext, WaitingRule, line_of, place_of, some
from ddpilot.record.journal import Entry

NUM_IN_VAIN = 2
"""Number of backwards reduced despite `no_sync` before the warning."""

_AGAIN_AFTER = 16
"""The warning is repeated after this many more: in a session they may belong to a different cell."""


class NoSyncInVain(PromptRule):
    """DDP328: `no_sync` around a backward whose forward ran outside of it."""

    codes = ("DDP328",)
    kinds = ("step",)

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._num: BoundedDict[tuple[int, tuple[str, int]], int] = BoundedDict(256)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        site = entry.values.get("vain")
        if not site:
            return
        key = rank, line_of(site)
        self._num[key] = num = self._num.get(key, 0) + 1
        if num % _AGAIN_AFTER == NUM_IN_VAIN:
            yield make_finding(
                "DDP328",
                summary="no_sync() has no effect here: gradients were reduced in every backward",
                ranks=(rank,),
                line=place_of(site),
                evidence=(f"seen before {num} optimizer steps, last before step {entry.values['n']}",),
                why="DDP reduces the first backward after a forward outside of `no_sync()`, of whichever forward it is",
                fix="Put every forward of the model into `no_sync()` too (of a ddpilot.Loop: into `loop.accumulate`), "
                "or run it under `torch.no_grad()` if its gradients are not needed",
            )


class DataParallel(PromptRule):
    """DDP330: `nn.DataParallel` trains in a job of several ranks."""

    codes = ("DDP330",)
    kinds = ("data_parallel",)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        yield make_finding(
            "DDP330",
            summary=f"nn.DataParallel trains a model in a job of {self._context.world_size} ranks",
            ranks=(rank,),
            line=place_of(entry.values["site"]),
            why="DataParallel spreads a batch over the devices of one process; ranks learn nothing of each other by it",
            fix="Use `DistributedDataParallel(model)` instead, with one device per rank",
        )


class NeedlessFindUnused(PromptRule):
    """DDP502: `find_unused_parameters=True` for a model that uses all of its parameters."""

    codes = ("DDP502",)
    kinds = ("unused",)

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._needless: BoundedDict[tuple[str, str], set[int]] = BoundedDict(256)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        values = entry.values
        ranks = self._needless.setdefault((values["group"], values["ordinal"]), set())
        if not values["num_bytes"]:
            ranks.add(rank)
        group = values["group"]
        if len(ranks) == (self._context.world_size if group == "world" else len(group.split(","))):
            yield make_finding(
                "DDP502",
                summary=f"no parameter was unused in the first {values['num_backwards']} backwards, on any rank",
                ranks=tuple(sorted(ranks)),
                line=place_of(values["site"]),
                why="find_unused_parameters=True walks the whole graph in each step, for nothing if none is unused",
                fix="Leave it out, unless a branch that is taken later leaves parameters unused",
            )


class _Failure(NamedTuple):
    """A failure of DDP's forward because of some parameters. `said`: the text for one parameter, and for several."""

    code: str
    said: tuple[str, str]
    why: str
    fix: str


_FAILURES = {
    "frozen": _Failure(
        "DDP310",
        ("was frozen after the model was wrapped", "were frozen after the model was wrapped"),
        "DDP waits in each backward for the gradients of all that could be trained when it was constructed",
        "Freeze first, then wrap; wrap again where the set changes",
    ),
    "left_out": _Failure(
        "DDP308",
        ("took no part in the backward pass", "took no part in the backward pass"),
        "DDP waits in each backward for a gradient of every parameter that could be trained when it was constructed; "
        "the loss of the round before did not depend on these",
        "Take them out or freeze them before wrapping, let the loss depend on them, or wrap with "
        "`find_unused_parameters=True`",
    ),
}
"""By kind of entry."""


class GradientsMissing(PromptRule):
    """DDP308 and DDP310: DDP failed because gradients of frozen or unused parameters are missing."""

    codes = tuple(failure.code for failure in _FAILURES.values())
    kinds = tuple(_FAILURES)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        names, num = entry.values["names"], entry.values["num"]
        failure = _FAILURES[entry.kind]
        one, several = failure.said
        said = f"{num} parameters {several}" if num > 1 else f"1 parameter {one}"
        yield make_finding(
            failure.code,
            summary=f"{said}: {some(names, total=num)}",
            ranks=(rank,),
            line=place_of(entry.values["site"]),
            why=failure.why,
            fix=failure.fix,
        )


_UNITS = ("B", "kB", "MB", "GB")


class AccumulationSynced(WaitingRule):
    """Reports models whose first steps accumulate with every backward reduced, as noted by a probe."""

    codes: tuple[str, ...] = ("DDP505",)
    kinds: tuple[str, ...] = ("synced",)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        self._waiting.put(line_of(entry.values["site"]), rank, entry.values, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, Any]) -> Finding:
        values = next(iter(by_rank.values()))
        least, most, num_bytes = values["least"], values["most"], values["num_bytes"]
        num = str(most) if least == most else f"{least} to {most}"
        return make_finding(
            "DDP505",
            summary=f"each update exchanges its gradients {num} times: {_say(most * num_bytes)} instead of "
            f"{_say(num_bytes)}",
            ranks=tuple(by_rank),
            line=place_of(values["site"]),
            evidence=(
                f"{num} backwards add up to each step, and DDP all-reduces after each of them",
                f"gradients of the model: {_say(num_bytes)}",
            ),
            why="DDP all-reduces in every backward, unless forward and backward run inside `no_sync()`; the sum that "
            "the step takes is the same where only the last one is reduced",
            fix="Run forward and backward of all but the last micro-batch before a step in `with model.no_sync():`",
        )


def _say(num_bytes: float) -> str:
    for unit in _UNITS:
        if num_bytes < 1000 or unit == _UNITS[-1]:
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}"
