# SPDX-License-Identifier: Apache-2.0
"""Detect averaging without DDP, and programs that average gradients themselves and omit some."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.parameters.causes import LEFT_OUT, UNLIKE, Cause
from ddpilot.guard.rules.parameters.fingerprint_comparison import seen_gradients
from ddpilot.guard.rules.parameters.steps import MatchedStep
from ddpilot.guard.rules.rule import place_of, some
from ddpilot.record.flight_ring.log import CallSite, Collective, RankLog
from ddpilot.user_files import CodeLine

_AVERAGING = ("reduce", "gather", "broadcast")
_MAX_LINES = 3


class Averaged:
    """Parameters of one optimizer whose gradients and values are equal on all ranks, in the optimizer's order.

    `are_weights_apart`: True if only the gradients need to be equal.
    """

    def __init__(self, matched: MatchedStep, *, are_weights_apart: bool = False) -> None:
        rank, fingerprint = min(matched.fingerprints.items(), key=lambda item: item[0])
        parameters = matched.sets[rank]
        apart = set(matched.difference.gradients) | (set() if are_weights_apart else set(matched.difference.parameters))
        gradients = seen_gradients(fingerprint)
        members = [
            (size, gradient)
            for name, size, gradient in zip(parameters["names"], parameters["sizes"], gradients, strict=True)
            if name not in apart and gradient != 0
        ]
        self.least = sum(size for size, gradient in members if gradient)
        """Number of elements of those that certainly have a gradient."""
        self._ends = {0, *accumulate(size for size, _ in members)}

    def covers(self, num_elements: int) -> bool:
        """Return True if `num_elements` is the size of one gradient, or of several consecutive ones as one tensor."""
        return any(end + num_elements in self._ends for end in self._ends)


def find_averaging(log: RankLog, since_ns: int, until_ns: int, averaged: Sequence[Averaged]) -> CallSite | None:
    """Return the line that averages all of these gradients in a step that lasted from `since_ns` to `until_ns`.

    None if the program also exchanges something else that is not a metric: the ranks may then hold parts of one model.
    """
    known: dict[int, bool] = {}
    num_averaged, line = 0, None
    for collective in _between(log, since_ns, until_ns):
        is_averaging = any(word in collective.op for word in _AVERAGING)
        for tensor in collective.inputs or collective.outputs:
            size = math.prod(tensor.shape)
            if size not in known:
                known[size] = any(each.covers(size) for each in averaged)
            if is_averaging and size and known[size]:
                num_averaged += size
                line = collective.line or line
            elif size >= MIN_EXCHANGED:
                return None
    least = min((each.least for each in averaged if each.least), default=0)
    return line if least and num_averaged >= least else None


def _between(log: RankLog, since_ns: int, until_ns: float = math.inf) -> Iterator[Collective]:
    """Yield what was not started by DDP in this time, newest first."""
    for collective in reversed(log.collectives):
        if collective.start_ns < since_ns:
            return
        if collective.ddp is None and collective.start_ns < until_ns:
            yield collective


def make_left_out_finding(first: MatchedStep, proof: MatchedStep, line: CallSite) -> Finding:
    """Return the finding for parameters that the averaging at `line` omits and that differ at `proof`."""
    called = _called(proof)
    differ = first.difference.gradients.keys() | proof.difference.gradients.keys() | proof.difference.parameters.keys()
    names = [shown for name, shown in called.items() if name in differ]
    summary = f"gradients of {len(names)} of the optimizer's {len(called)} parameters are not averaged over the ranks: "
    facts = _format_differing(first, "gradient of", first.difference.gradients, called)
    summary += some(names)
    return _make_finding(LEFT_OUT, proof, line, summary, ranks=tuple(sorted(proof.steps)), facts=facts)


def make_unlike_finding(proof: MatchedStep, line: CallSite, num_checked: int) -> Finding:
    """Return the finding for weights that were never equal while the program averages their gradients at `line`."""
    num_differing, num = len(proof.difference.parameters), len(_called(proof))
    summary = f"gradients are averaged, and {num_differing} of {num} parameters have differed between ranks from the "
    fact = f"gradients were the same on all ranks in {num_checked} steps that were checked"
    return _make_finding(UNLIKE, proof, line, summary + "first step on", fact)


def make_changed_finding(cause: Cause, proof: MatchedStep, line: CallSite, alike_at: int) -> Finding:
    """Return the finding for weights that were equal at step `alike_at`, and differ at `proof`.

    The program averages their gradients at `line`.
    """
    summary = f"gradients are averaged, and parameters differ between ranks before step {proof.number}"
    fact = f"parameters were the same on all ranks before step {alike_at}"
    return _make_finding(cause, proof, line, summary, fact, place=_stepped_at(proof))


def _make_finding(
    cause: Cause,
    proof: MatchedStep,
    averaged_at: CallSite,
    summary: str,
    *more: str,
    ranks: Sequence[int] = (),
    place: CodeLine | None = None,
    facts: Iterable[str] = (),
) -> Finding:
    """Return a warning about parameters that differ at `proof`. `facts` come before them, `more` after them.

    `ranks` and `place` default to the ranks that differ, and to the line that averages.
    """
    line = CodeLine(averaged_at.file, averaged_at.line, averaged_at.function, averaged_at.text)
    return make_finding(
        cause.code,
        severity="warning",
        summary=summary,
        ranks=ranks or proof.difference.ranks or tuple(sorted(proof.steps)),
        line=place or line,
        evidence=(
            *facts,
            *_format_differing(proof, "parameter", proof.difference.parameters, _called(proof)),
            *more,
            f"gradients are averaged at {averaged_at.place}",
            f"optimizer steps at {_stepped_at(proof)}",
        ),
        why=cause.why,
        fix=cause.fix,
    )


def _called(proof: MatchedStep) -> dict[str, str]:
    """Return the names that the program uses, by the names in fingerprints."""
    parameters = proof.sets[min(proof.steps)]
    return dict(zip(parameters["names"], parameters["called"], strict=True))


def _stepped_at(proof: MatchedStep) -> CodeLine | None:
    return place_of(proof.sets[min(proof.steps)]["site"])


def _format_differing(
    step: MatchedStep, what: str, differing: Mapping[str, str], called: Mapping[str, str]
) -> Iterator[str]:
    for name, values in islice(differing.items(), _MAX_LINES):
        yield f"step {step.number}: {what} {called[name]}: {values}"


MIN_EXCHANGED = 32
"""A collective or point-to-point operation of this many elements is not a metric.
Ranks that hold parts of one model exchange this much in at least every second step.
"""

_EXCHANGES = re.compile(
    r"reduce|broadcast|gather|scatter|send|recv|exchang|averag|avg(?!_?pool)|sync|merg|mix|shar(e|ing)|gossip|consensus|"
    r"fed|diloco|local_?sgd|outer|ensemble|member|fold|replica|independent|island|population",
    re.IGNORECASE,
)
"""Words in programs whose ranks train separately on purpose, temporarily or permanently."""

_APART = re.compile(
    r"(?<!un)(?<!mani)fold(?!er)|ensemble|bootstrap|sweep|trial|grid|hyper_?param|cross_?val|(?<!re)search",
    re.IGNORECASE,
)
"""Words in programs whose ranks train separately on purpose, and never meet."""

_RANK = re.compile(r"\bRANK\b")
_GROUP = re.compile(r"process_group|init_group")


def is_never_exchanged(files: Iterable[str], texts: Mapping[str, str]) -> bool:
    """Return True if the user's `files` are known and nothing in them suggests an exchange or separate training.

    `texts`: by name, sources that are not in a file.
    """
    sources = _read(files, texts)
    return bool(sources) and all(source and not _EXCHANGES.search(source) for source in sources)


def mentions_group(files: Iterable[str], texts: Mapping[str, str]) -> bool:
    """Return True if one of the user's `files` may create a process group; see above."""
    return any(_GROUP.search(source) for source in _read(files, texts))


def is_meant_apart(files: Iterable[str], texts: Mapping[str, str]) -> bool:
    """Return True if one of the user's `files` reads the rank and names a purpose of separate training; see above."""
    return any(_RANK.search(source) and _APART.search(source) for source in _read(files, texts))


def _read(files: Iterable[str], texts: Mapping[str, str]) -> list[str]:
    return [texts.get(file) or "".join(linecache.getlines(file)) for file in files if file]


def may_be_reduced(log: RankLog, since_ns: int, num_elements: int) -> bool:
    """Return True if a collective outside DDP since `since_ns` moved at least `num_elements`, or may have.

    It may have if the log no longer reaches back that far. Point-to-point operations count too: gossip averages with
    them.
    """
    if any(_num_elements(collective) >= num_elements for collective in _between(log, since_ns)):
        return True
    oldest = next(iter(log.collectives), None)
    return oldest is not None and oldest.index > 1 and oldest.start_ns >= since_ns


def num_exchanged(log: RankLog, since_ns: int, num_elements: int) -> int:
    """Count collectives and point-to-point operations outside DDP since `since_ns` of at least `num_elements`."""
    return sum(_num_elements(collective) >= num_elements for collective in _between(log, since_ns))


def _num_elements(collective: Collective) -> int:
    tensors = (*collective.inputs, *collective.outputs)
    return sum(math.prod(tensor.shape) for tensor in tensors)
