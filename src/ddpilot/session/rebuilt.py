# SPDX-License-Identifier: Apache-2.0
"""Messages about a process group that was rebuilt."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ddpilot.findings.text import render_ranks

_MAX_LINES = 5


def describe_rebuilt(
    values: Sequence[Mapping[str, Any]],
    duration_s: float,
    *,
    live: Collection[int],
    restarted: Collection[int],
    unfinished: Collection[int] = (),
) -> Iterator[str]:
    """Yield the messages to show after a rebuild, one line each.

    `values`: the reply of each rank; `live`: all live ranks; `restarted`: those of them that lost their variables;
    `unfinished`: ranks on whose devices collectives were aborted with optimizer steps queued behind them.
    """
    rebound = max(value["rebound"] for value in values)
    models = f"; {rebound} DDP model{'s' * (rebound > 1)} bound to it" if rebound else ""
    whose = {*live} - {*restarted}
    kept = f", variables{f' of {render_ranks(whose)}' if restarted else ''} are kept" if whose else ""
    yield f"the process group was freed and rebuilt in {duration_s:.1f} s{kept}{models}"
    lost = sorted({text for value in values for text in value["lost"]})
    if lost:
        yield f"gone with the old group, create again what you still need: {', '.join(lost)}"
    for unbound in sorted({text for value in values for text in value["unbound"]}):
        yield f"not bound to the new group: {unbound}"
    if unfinished:
        yield (
            f"collectives were aborted on the devices of {render_ranks(sorted(unfinished))}: models and optimizers "
            "there may hold an unfinished update; load a checkpoint on all ranks before training on"
        )
    yield from describe_differences(values)


def describe_differences(values: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield messages about DDP models that differ between ranks; none if all are equal. `values` as above."""
    if values and values[0]["disagreements"]:
        yield from _describe_disagreements(values[0]["disagreements"], values[0]["named"])


def _describe_disagreements(plain: Sequence[str], named: Mapping[str, str]) -> Iterator[str]:
    """Yield messages about differing models.

    `plain`: a sentence per parameter; `named`: one per variable that holds a model.
    """
    yield from list(named.values() or plain)[:_MAX_LINES]
    if any("numbers of DDP models" in text or "different models" in text for text in plain):
        yield "run the cells that make the models again, on all ranks, before the next step"
        return
    variable = next((name for name in named if " " not in name), None)
    of_rank_zero = (
        f"`for p in {variable}.parameters(): group.broadcast(p.data)`"
        if variable is not None
        else "`group.broadcast(p.data)` for each parameter `p` of the model"
    )
    yield (
        f"{len(plain)} parameter{'s' * (len(plain) > 1)} would stay apart: load a checkpoint on all ranks, or take "
        f"rank 0's ({of_rank_zero}) and create the optimizer again"
    )
