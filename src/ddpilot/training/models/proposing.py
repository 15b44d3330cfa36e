# SPDX-License-Identifier: Apache-2.0
"""Proposes DDP options from what DDP has recorded on all ranks; not applied, since a branch may be taken later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ddpilot.findings.finding import Finding
from ddpilot.training.models.ddp_options import Choice

MIN_UPDATES = 10
"""Number of updates before which nothing is proposed."""
_MAX_WAITING = 0.25
"""Fraction of an update's time spent only waiting for the all-reduce, above which it is reported."""
_MIN_BYTES = 1_000_000
"""At 10 Gbit/s a megabyte takes about a millisecond. The duration of a smaller all-reduce depends on latency and late
ranks: fewer bytes would not shorten it, and such a model trains fast on one rank."""


@dataclass(frozen=True)
class Seen:
    """What one rank's DDP has recorded for one model."""

    num_updates: int
    finds_unused: bool
    is_steady: bool
    """True if all updates so far used the same parameters. Known only with `finds_unused`."""
    left_out: tuple[str, ...]
    """Parameters without a gradient in the last update that DDP recorded."""
    bucket_bytes: tuple[int, ...] = ()
    exchanged_bytes: int = 0
    """Bytes that a rank all-reduces per update: with `comm`, half of the buckets."""
    is_rebuilt: bool = False
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    exchange_ms: float = 0.0
    overlap_ms: float = 0.0
    """Part of the all-reduce that overlapped with the backward pass."""


def find_value(choices: Sequence[Choice], option: str) -> str:
    """Return the value chosen for `option`, as text; "None" if there is none."""
    return next((choice.value for choice in choices if choice.option == option), "None")


def list_remedies(model: nn.Module, choices: Sequence[Choice], accumulation: int) -> list[str]:
    """Return the options that would shorten the all-reduce of `model` and are neither in use nor unsupported."""
    halves = all(parameter.dtype == torch.float32 for parameter in model.parameters() if parameter.requires_grad)
    remedies = {
        "accumulate=... (of Loop or Trainer), which exchanges once for several": accumulation == 1,
        'comm="bf16", which halves the bytes and rounds gradients to 8 bits': (
            halves and find_value(choices, "comm") == "None"
        ),
        "another bucket_cap_mb": find_value(choices, "bucket_cap_mb") == "25",
    }
    return [remedy for remedy, is_open in remedies.items() if is_open]


def propose(facts: Sequence[Seen], model: str, remedies: Sequence[str]) -> tuple[Finding, ...]:
    """Return proposals for one model as findings of severity "info". `facts`: in rank order.

    `remedies`: options that would shorten the all-reduce, from `list_remedies`.
    """
    if min(fact.num_updates for fact in facts) < MIN_UPDATES:
        return ()
    return (*_about_unused(facts, model), *_about_exchange(facts, remedies))


def _about_unused(facts: Sequence[Seen], model: str) -> Iterable[Finding]:
    if not facts[0].finds_unused or not all(fact.is_steady for fact in facts):
        return
    num = min(fact.num_updates for fact in facts)
    if not any(fact.left_out for fact in facts):
        yield Finding(
            code="DDP502",
            name="needless-find-unused",
            severity="info",
            summary=f"every update so far has used every parameter of {model}, on every rank",
            evidence=(f"{num} updates, ranks 0-{len(facts) - 1}",),
            why="find_unused_parameters=True searches the graph in each forward, and keeps the buckets in the order of "
            "definition, so that less of the exchange runs during the backward pass.",
            fix="Leave it out, if no branch comes later or on one rank only; one that does is an error that names the "
            "parameter.",
        )
    elif len({fact.left_out for fact in facts}) == 1:
        names = facts[0].left_out
        yield Finding(
            code="DDP503",
            name="parameters-never-used",
            severity="info",
            summary=f"the same parameters of {model} were left out in every update so far, on every rank",
            evidence=(
                f"{num} updates: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}",
            ),
            why="find_unused_parameters=True searches the graph in each forward for what does not change.",
            fix="Freeze them before prepare(), with requires_grad_(False), or, if that holds for the whole training, "
            "pass static_graph=True in its place.",
        )


def _about_exchange(facts: Sequence[Seen], remedies: Sequence[str]) -> Iterator[Finding]:
    if facts[0].exchanged_bytes < _MIN_BYTES:
        return
    # The rank that waits least came last: its waiting time is the all-reduce itself, without waiting for other ranks.
    least = min(facts, key=lambda fact: fact.exchange_ms - fact.overlap_ms)
    waiting = least.exchange_ms - least.overlap_ms
    whole = least.forward_ms + least.backward_ms + waiting
    if waiting <= _MAX_WAITING * whole:
        return
    parts = f"forward {least.forward_ms:.2f} ms, backward {least.backward_ms:.2f} ms"
    yield Finding(
        code="DDP504",
        name="exchange-not-hidden",
        severity="info",
        summary=f"{100 * waiting / whole:.0f} % of an update is spent waiting for gradients",
        ranks=(facts.index(least),),
        evidence=(f"{parts}, then {waiting:.2f} ms of exchange alone, on the rank that waits least",),
        why="The exchange of a bucket runs during the backward pass of earlier layers; the rest is waited for.",
        fix=f"{'; '.join(['Larger batches', *remedies])}.",
    )
