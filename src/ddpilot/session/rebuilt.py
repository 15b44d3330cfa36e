# SPDX-License-Identifier: Apache-2.0
"""What is said of a process group that was made anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MAX_LINES = 5


def describe_rebuilt(values: Sequence[Mapping[str, Any]], duration_s: float, is_kept: bool) -> Iterator[str]:
    """A line each. `values`: what each rank has answered; `is_kept`: whether any rank has variables to keep."""
    rebound = max(value["rebound"] for value in values)
    models = f"; {rebound} DDP model{'s' * (rebound > 1)} bound to it" if rebound else ""
    kept = ", variables are kept" if is_kept else ""
    yield f"the process group was freed and rebuilt in {duration_s:.1f} s{kept}{models}"
    lost = sorted({text for value in values for text in value["lost"]})
    if lost:
        yield f"gone with the old group, make anew what you still need: {', '.join(lost)}"
    for unbound in sorted({text for value in values for text in value["unbound"]}):
        yield f"not bound to the new group: {unbound}"
    yield from describe_differences(values)


def describe_differences(values: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines about the DDP models that differ over ranks; none if they are the same. `values` as above."""
    if values and values[0]["disagreements"]:
        yield from _describe_disagreements(values[0]["disagreements"], values[0]["named"])


def _describe_disagreements(plain: Sequence[str], named: Mapping[str, str]) -> Iterator[str]:
    """`plain`: a sentence for each parameter; `named`: one for each variable that holds such a model."""
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
        f"rank 0's ({of_rank_zero}) and make the optimizer anew"
    )
