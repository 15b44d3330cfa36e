# SPDX-License-Identifier: Apache-2.0
"""Explain ranks that died before any other rank waited for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.watch.explain.text import describe_shortly, place_of, say_call, say_place, who_does
from ddpilot.watch.snapshot.model import JobView
from ddpilot.watch.snapshot.stacks import chain_of

OF_ENDS = frozenset({"DDP208", "DDP209"})
"""Codes of findings about how a rank ended."""

_NEEDS_OTHERS = "DDP2"
_GOES_ON = "DDP204"
"""Different reduce-ops: the job does not stop because of them."""

_FIXES = {
    "SIGKILL": "look whether memory was out (`dmesg | tail`): fewer DataLoader workers, smaller batches",
    "SIGBUS": "look whether shared memory was full (`df /dev/shm`), or a file that it had mapped was cut off; see "
    "ddpilot explain DDP601",
    "SIGSEGV": "look at native code that it used last; the stack that Python's fault handler printed says where it was",
    "SIGABRT": "look at what it printed last: gloo and NCCL abort the process with a message",
}


def find_cause_of_end(findings: Iterable[Finding], rank: int) -> Finding | None:
    """Return the finding that makes `rank` fail as it waits for others; None if there is none.

    How `rank` itself ended is no cause of its end.
    """
    errors = (each for each in findings if each.code.startswith(_NEEDS_OTHERS) and each.severity == "error")
    others = (each for each in errors if each.code not in OF_ENDS or each.ranks != (rank,))
    return next((each for each in others if each.code != _GOES_ON), None)


def explain_death(view: JobView, ranks: Sequence[int], words: str) -> Finding:
    """Return the DDP209 finding for `ranks`, which ended as `words` describe."""
    seen = view.ranks[ranks[0]]
    chain = chain_of(seen, None)
    last = seen.log.collectives[-1] if seen.log is not None and seen.log.collectives else None
    where = say_place(last.line) if last is not None else ""
    evidence = [f"its last was {f'{describe_shortly(last)}, {where}' if where else say_call(last)}"] if last else []
    signal_name = seen.process.signal_name or ""
    place = place_of(chain[-1]) if chain else place_of(last.line) if last is not None else None
    return make_finding(
        "DDP209",
        summary=who_does(ranks, words),
        ranks=tuple(ranks),
        line=place,
        evidence=tuple(evidence),
        why="the other ranks cannot continue without it: their later errors follow from it",
        fix=_FIXES.get(signal_name, "look at how it ended: at its last lines and its traceback"),
    )
