# SPDX-License-Identifier: Apache-2.0
"""Pushed values that belong to others: an optimizer to its parameters, a scheduler to its optimizer."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ddpilot.errors import LaunchError
from ddpilot.findings.words import render_ranks
from ddpilot.launching.shipping.pickling import ShipPickler, loaded_torch


def check_complete(values: Mapping[str, object]) -> None:
    """Raise LaunchError for an optimizer whose parameters are in none of the other `values`, and so for a scheduler.

    Pushed alone it would get copies of them, which no model on the rank uses: training would change nothing.
    """
    torch = loaded_torch()
    if torch is None or not hasattr(torch, "optim"):
        return
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    others = {name: value for name, value in values.items() if not isinstance(value, kinds)}
    for name, value in values.items():
        if isinstance(value, kinds[1]) and not any(other is value.optimizer for other in values.values()):
            _refuse(name, "the optimizer that it drives is not pushed with it: it would drive a copy", "optimizer")
        elif isinstance(value, kinds[0]) and not _hold_parameters(torch, value, others):
            _refuse(name, "not all parameters that it updates are pushed with it: it would update copies", "model")


def _hold_parameters(torch: Any, optimizer: Any, others: Mapping[str, object]) -> bool:
    """True if every parameter of `optimizer` is somewhere in `others`."""
    modules = [other for other in others.values() if isinstance(other, torch.nn.Module)]
    found = {id(parameter) for module in modules for parameter in module.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [each for each in parameters if id(each) not in found and each.device.type != "meta"]
    if not missing:
        return True
    pickler = ShipPickler(io.BytesIO(), lambda buffer: None)  # finds the storages of others, however deep they are
    try:
        pickler.dump(dict(others))
    except Exception:  # noqa: BLE001  # shipping them fails next, and names what cannot be pickled
        return True
    return all(each.untyped_storage()._cdata in pickler.storages for each in missing)


def _refuse(name: str, found: str, kind: str) -> None:
    raise LaunchError(
        f"pushing `{name}`",
        found=found,
        fix=f"Push both at once, as in `%ddp push {kind} {name}`, or make `{name}` in a cell on the ranks",
    )


def describe_pushed(names: Iterable[str], by_rank: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Lines about what the ranks answered to a push of `names`: what they kept, and what still uses older values."""
    kept = sorted({name for answer in by_rank.values() for name in answer["kept"]})
    if kept:
        ranks = render_ranks([rank for rank, answer in by_rank.items() if answer["kept"]])
        yield (
            f"{_list(names)} {'uses' if len(list(names)) == 1 else 'use'} {_list(kept)}, and {ranks} kept their own; "
            f"`%ddp push {' '.join(kept)}` replaces {_them(kept)}"
        )
    for name in sorted({name for answer in by_rank.values() for name in answer["stale"]}):
        users = sorted({user for answer in by_rank.values() for user in answer["stale"].get(name, ())})
        yield (
            f"{_list(users)} on the ranks still {'has' if len(users) == 1 else 'have'} the parameters of the earlier "
            f"`{name}`; push both at once, or make {_them(users)} again on the ranks"
        )


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
