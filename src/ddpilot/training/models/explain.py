# SPDX-License-Identifier: Apache-2.0
"""`Explanation` of what `prepare` chose, why and at what cost, with proposals from what DDP recorded on all ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddpilot.checkpoint.weights import class_name
from ddpilot.errors import list_names
from ddpilot.findings.catalog import how_to_open
from ddpilot.findings.display import Findings, render_html, render_text
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.group.protocol import GroupLike
from ddpilot.training.models.ddp import Choice
from ddpilot.training.models.optimizers import ShardedState, local_optimizer
from ddpilot.training.models.registry import PreparedModel, PreparedObjects


@dataclass(frozen=True)
class Explained:
    """The explanation of one model or optimizer that `prepare` returned."""

    title: str
    """Its class, and how it was wrapped."""
    choices: tuple[Choice, ...] = ()
    """Every option with its reason; empty if nothing was wrapped."""
    measured: tuple[str, ...] = ()
    """Measurements so far, one per line."""
    proposals: tuple[Finding, ...] = ()
    """Changes that the measurements suggest; they are not applied automatically."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """The explanations of all prepared objects, in order; printed as text, shown as a table in a notebook."""

    parts: tuple[Explained, ...]

    @property
    def proposals(self) -> Findings:
        """The proposals of all parts."""
        return Findings(proposal for part in self.parts for proposal in part.proposals)

    def __str__(self) -> str:
        return "\n\n".join(_render(part) for part in self.parts) or "nothing has been prepared yet"

    __repr__ = __str__

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))

    def _repr_html_(self) -> str:
        parts = "".join(_render_html(part) for part in self.parts)
        return f'<div class="ddpilot-explanation">{parts or "<p>nothing has been prepared yet</p>"}</div>'


def _render(part: Explained) -> str:
    width = max((len(f"{option} = {value}") for option, value, _ in part.choices), default=0)
    lines = [part.title]
    lines += [f"  {f'{option} = {value}':<{width}}  {why}" for option, value, why in part.choices]
    lines += [f"  {line}" for line in part.measured]
    lines += [f"  {line}".rstrip() for line in render_text(part.proposals).split("\n") if part.proposals]
    return "\n".join(lines)


def _render_html(part: Explained) -> str:
    rows = "".join(
        f'<tr><td style="text-align:left"><code>{escape(option)} = {escape(value)}</code></td>'
        f'<td style="text-align:left">{escape(why)}</td></tr>'
        for option, value, why in part.choices
    )
    seen = "".join(f"<div>{escape(line)}</div>" for line in part.measured)
    table = f"<table>{rows}</table>" if rows else ""
    return f"<div><b>{escape(part.title)}</b></div>{table}{seen}{render_html(part.proposals) if part.proposals else ''}"


_NS_PER_MS = 1_000_000
_16_BIT = ("bf16", "fp16")


def explain(
    prepared: PreparedObjects, group: GroupLike, accumulation: int, name_of: Callable[[object], str]
) -> Explanation:
    """Build the explanation of `Loop.explain`. Collective if there are several ranks.

    `accumulation`: batches per update. `name_of`: returns the name of a model or optimizer in a checkpoint.
    """
    models, optimizers = prepared.models, prepared.optimizers
    own = [_read_ddp(one) for one in models], [_count_state(one) for one in optimizers]
    of_ranks = group.all_gather_object(own) if group.world_size > 1 else [own]
    names = _distinct_names([(class_name(one.model), name_of(one.model)) for one in models])
    parts = [
        _explain_model(one, names[place], [seen[place] for seen, _ in of_ranks], group.world_size, accumulation)
        for place, one in enumerate(models)
    ]
    names = _distinct_names([(type(local_optimizer(one)).__name__, name_of(one)) for one in optimizers])
    for place, optimizer in enumerate(optimizers):
        parts.append(_explain_optimizer(optimizer, names[place], [sizes[place] for _, sizes in of_ranks]))
    return Explanation(tuple(parts))


def _distinct_names(named: Sequence[tuple[str, str]]) -> list[str]:
    """Return the class name of each, with its own name if the class is not unique or the user chose the name."""
    counts = Counter(kind for kind, _ in named)
    is_given = [not re.fullmatch(r"(model|averaged|optimizer)\d*", name) for _, name in named]
    pairs = zip(named, is_given, strict=True)
    return [f"{kind} ({name})" if given or counts[kind] > 1 else kind for (kind, name), given in pairs]


def _read_ddp(one: PreparedModel) -> Seen | None:
    """Return what this rank's DDP has recorded; None if the model is not wrapped."""
    ddp = one.ddp
    if ddp is None:
        return None
    data: dict[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    order = data.get("prev_iteration_grad_ready_order_indices")
    ready = {int(index) for index in order.split(",")} if order else set()
    times = [
        data.get(f"avg_{name}_time", 0) / _NS_PER_MS
        for name in ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap")
    ]
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    bucket_bytes = tuple(int(size) for size in sizes.split(",") if size.strip())
    num_elements = sum(p.numel() for p in ddp.module.parameters() if p.requires_grad)
    return Seen(
        num_updates=int(data.get("iteration", 0)),
        finds_unused=ddp.find_unused_parameters,
        # Asks the reducer: with several models, the logger records `can_set_static_graph` of the first one only.
        is_steady=ddp.reducer._ddp_graph_static(),  # type: ignore[attr-defined]
        left_out=tuple(name for n, name in enumerate(one.reduced) if n not in ready) if ready else (),
        bucket_bytes=bucket_bytes,
        exchanged_bytes=2 * num_elements if find_value(one.choices, "comm") in _16_BIT else sum(bucket_bytes),
        is_rebuilt=bool(data.get("has_rebuilt_buckets")),
        forward_ms=times[0],
        backward_ms=times[1],
        exchange_ms=times[2],
        overlap_ms=times[3],
    )


def _explain_model(
    one: PreparedModel, name: str, seen: Sequence[Seen | None], world_size: int, accumulation: int
) -> Explained:
    facts = [fact for fact in seen if fact is not None]
    if one.is_sharded:
        return Explained(f"{name}: parameters sharded over {world_size} ranks (FSDP2), not in DDP")
    if one.ddp is None or not facts:
        why = "world_size is 1" if world_size == 1 else "it has no trainable parameters"
        return Explained(f"{name}: not wrapped in DDP, as {why}")
    title = f"{name}: DistributedDataParallel over {world_size} ranks"
    measured = [_describe_buckets(facts[0], one.ddp), *_describe_times(facts), *_describe_left_out(facts)]
    return Explained(
        title,
        one.choices,
        tuple(measured),
        propose(facts, name, list_remedies(one.module, one.choices, accumulation)),
    )


def _describe_buckets(fact: Seen, ddp: DistributedDataParallel) -> str:
    total = sum(fact.bucket_bytes)
    order = "in the order of the gradients" if fact.is_rebuilt else "in the order of definition"
    views = f"; views save {_size(total)} on each rank" if ddp.gradient_as_bucket_view else ""
    sizes = ", ".join(_size(size) for size in fact.bucket_bytes)
    num = len(fact.bucket_bytes)
    return (
        f"gradients: {_size(total)} in {num} bucket{'s' if num != 1 else ''} ({sizes}) {order}; "
        f"each rank all-reduces {_size(fact.exchanged_bytes)} per update{views}"
    )


def _describe_times(facts: Sequence[Seen]) -> Iterable[str]:
    num = min(fact.num_updates for fact in facts)
    if not num or not facts[0].backward_ms:
        return [f"times: not measured yet, after {num} updates"]
    slowest = max(facts, key=lambda fact: fact.forward_ms + fact.backward_ms)
    parts = f"forward {slowest.forward_ms:.2f} ms, backward {slowest.backward_ms:.2f} ms"
    exchange = f"all-reduce {slowest.exchange_ms:.2f} ms ({slowest.overlap_ms:.2f} ms during the backward pass)"
    return [f"times: up to update {num}, on the slowest rank ({facts.index(slowest)}): {parts}, {exchange}"]


def _describe_left_out(facts: Sequence[Seen]) -> Iterable[str]:
    changing = [rank for rank, fact in enumerate(facts) if not fact.is_steady]
    if changing:
        yield f"the parameters in use have changed on {render_ranks(changing)}: find_unused_parameters=True is needed"
    for rank, fact in enumerate(facts):
        if fact.left_out:
            yield f"rank {rank} left out {list_names(fact.left_out)} in the last update that DDP recorded"


def _count_state(optimizer: Optimizer) -> int:
    state = local_optimizer(optimizer).state
    return sum(v.nbytes for values in state.values() for v in values.values() if isinstance(v, torch.Tensor) and v.ndim)


def _explain_optimizer(optimizer: Optimizer, name: str, sizes: Sequence[int]) -> Explained:
    if isinstance(optimizer, ShardedState):
        held = f"state: {', '.join(map(_size, sizes))} on ranks 0 to {len(sizes) - 1}, {_size(sum(sizes))} in total"
        why = "each rank updates its share of the parameters and broadcasts it"
        return Explained(f"{name}: ZeroRedundancyOptimizer", (Choice("shard", "optimizer", why),), (held,))
    if len(sizes) == 1 or not sizes[0]:
        return Explained(f"{name}: unchanged", (), (f"state: {_size(sizes[0])}",))
    held = f'state: {_size(sizes[0])} on each rank; with shard="optimizer" about {_size(sizes[0] // len(sizes))}'
    return Explained(f"{name}: unchanged", (Choice("shard", "None", "every rank updates all parameters"),), (held,))


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} GB"


MIN_UPDATES = 10
"""Number of updates before which nothing is proposed."""
_MAX_WAITING = 0.25
"""Fraction of an update's time spent only waiting for the all-reduce, above which it is reported."""
_MIN_BYTES = 1_000_000
"""At 10 Gbit/s a megabyte takes about a millisecond. The duration of a smaller all-reduce depends on latency and late
ranks: fewer bytes would not shorten it, and such a model trains fast on one rank."""


@dataclass(frozen=True)
class Seen:
    """Records of one rank's DDP for one model."""

    num_updates: int
    finds_unused: bool
    is_steady: bool
    """True if all updates so far used the same parameters. Known only with `finds_unused`."""
    left_out: tuple[str, ...]
    """Parameters without a gradient in the last update that DDP recorded."""
    bucket_bytes: tuple[int, ...] = ()
    exchanged_bytes: int = 0
    """Bytes that a rank all-reduces per update, in 16 bits or in the gradients' own dtype."""
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
        "accumulate=... (of Loop or Trainer), with one all-reduce for several batches": accumulation == 1,
        'comm="bf16", which halves the bytes and rounds gradients to 8 bits': (
            halves and find_value(choices, "comm") == "None"
        ),
        "a different bucket_cap_mb": find_value(choices, "bucket_cap_mb") == "25",
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
            summary=f"every update so far used every parameter of {model}, on every rank",
            evidence=(f"{num} updates, ranks 0-{len(facts) - 1}",),
            why="find_unused_parameters=True searches the graph in each forward pass and keeps the buckets in the "
            "order of definition, so that less of the all-reduce overlaps with the backward pass.",
            fix="Omit it if no parameter is left out later or on one rank only; that would raise an error with the "
            "parameter's name.",
            source=how_to_open("DDP502"),
        )
    elif len({fact.left_out for fact in facts}) == 1:
        names = facts[0].left_out
        yield Finding(
            code="DDP503",
            name="parameters-never-used",
            severity="info",
            summary=f"the same parameters of {model} were left out in every update so far, on every rank",
            evidence=(f"{num} updates: {list_names(names)}",),
            why="find_unused_parameters=True searches the graph in each forward pass, with the same result each time.",
            fix="Freeze them before prepare(), with requires_grad_(False), or, if they are never used in the whole "
            "training, pass static_graph=True instead.",
            source=how_to_open("DDP503"),
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
        evidence=(f"{parts}, then {waiting:.2f} ms of all-reduce alone, on the rank that waits least",),
        why="The all-reduce of a bucket overlaps with the backward pass of earlier layers; ranks wait for the rest.",
        fix=f"{'; '.join(['Larger batches', *remedies])}.",
        source=how_to_open("DDP504"),
    )
