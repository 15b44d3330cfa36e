# SPDX-License-Identifier: Apache-2.0
"""Check that optimizers and schedulers are pushed or pulled together with what they update."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddpilot.errors import LaunchError, ShipError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.shipping.pickling import ShipPickler, loaded_torch

MISSING = "there is no variable of that name"


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A value that is sent without the object that it refers to."""

    name: str
    kind: str
    """Kind of the missing object: "model" or "optimizer"."""
    found: str
    """A sentence with the placeholder {verb}, to be filled with "pushed" or "pulled"."""


def check_complete(values: Mapping[str, object]) -> None:
    """Raise LaunchError if `values` has an optimizer without its parameters, or a scheduler without its optimizer.

    Pushed alone, it would refer to copies that no model on the rank uses, and training would change nothing.
    """
    if (incomplete := find_incomplete(values)) is not None:
        name = incomplete.name
        raise LaunchError(
            f"pushing `{name}`",
            found=incomplete.found.format(verb="pushed"),
            fix=f"Push both at once, as in `%ddp push {incomplete.kind} {name}`, "
            f"or create `{name}` in a cell on the ranks",
        )


def find_incomplete(values: Mapping[str, object]) -> Incomplete | None:
    """Return an optimizer whose parameters are not all in the other `values`, or a scheduler without its optimizer."""
    torch = loaded_torch()
    if torch is None or not hasattr(torch, "optim"):
        return None
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    others = {name: value for name, value in values.items() if not isinstance(value, kinds)}
    for name, value in values.items():
        if isinstance(value, kinds[1]) and not any(other is value.optimizer for other in values.values()):
            return Incomplete(
                name, "optimizer", "the optimizer that it drives is not {verb} with it: it would drive a copy"
            )
        if isinstance(value, kinds[0]) and not _hold_parameters(torch, value, others):
            return Incomplete(
                name, "model", "not all parameters that it updates are {verb} with it: it would update copies"
            )
    return None


def find_companions(name: str, variables: Mapping[str, object]) -> list[str] | None:
    """Return the names of `variables` to push with `name`, in dependency order; None if one of them does not exist."""
    names = [name]
    while (incomplete := find_incomplete({each: variables[each] for each in names})) is not None:
        found = _find_owners(incomplete, variables)
        if not found or set(found) <= set(names):
            return None
        names = [*found, *names]
    return names


def _find_owners(incomplete: Incomplete, variables: Mapping[str, Any]) -> list[str]:
    torch, value = loaded_torch(), variables[incomplete.name]
    if incomplete.kind == "optimizer":
        return [name for name, other in variables.items() if other is value.optimizer][:1]
    wanted = {id(parameter) for group in value.param_groups for parameter in group["params"]}
    modules = {name: other for name, other in variables.items() if issubclass(type(other), torch.nn.Module)}
    held = {name: wanted & {id(each) for each in module.parameters()} for name, module in modules.items()}
    return [name for name, own in held.items() if own == wanted][:1] or [name for name, own in held.items() if own]


def _hold_parameters(torch: Any, optimizer: Any, others: Mapping[str, object]) -> bool:
    """True if every parameter of `optimizer` is held by a value in `others`, at any depth."""
    modules = [other for other in others.values() if isinstance(other, torch.nn.Module)]
    found = {id(parameter) for module in modules for parameter in module.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [each for each in parameters if id(each) not in found and each.device.type != "meta"]
    if not missing:
        return True
    pickler = ShipPickler(io.BytesIO(), lambda buffer: None)  # collects the storages in `others` at any depth
    try:
        pickler.dump(dict(others))
    except Exception:  # noqa: BLE001  # shipping them fails next, and names what cannot be pickled
        return True
    return all(each.untyped_storage()._cdata in pickler.storages for each in missing)


def describe_pushed(names: Iterable[str], by_rank: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Yield messages about the replies of ranks to a push: variables they kept, and variables that use older values."""
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
            f"`{name}`; push both at once, or create {_them(users)} again on the ranks"
        )


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"


def make_refusal(found: str, fix: str = "", *, path: str = "") -> dict[str, str]:
    """Return a refusal. `path` is the path of the object that cannot be pickled, if any."""
    return {"found": found, "fix": fix, "path": path}


def make_refusal_error(did: str, by_rank: Mapping[int, Mapping[str, str]]) -> LaunchError:
    """Build one error from the refusals of the ranks: the first refusal, all ranks that share it, and all their fixes.

    `did` is used if the refusal names no "expression". The error is a ShipError if a value cannot be pickled.
    """
    first = by_rank[min(by_rank)]
    alike = [rank for rank, refusal in by_rank.items() if refusal["found"] == first["found"]]
    did = f"pulling `{first['expression']}`" if "expression" in first else did
    did = f"{did} from {render_ranks(alike)}"
    fix = " ".join(dict.fromkeys(by_rank[rank]["fix"] for rank in sorted(alike) if by_rank[rank]["fix"]))
    if first["path"]:
        return ShipError(did, path=first["path"], found=first["found"], fix=fix)
    return LaunchError(did, found=first["found"], fix=fix)


def user_names(namespace: Mapping[str, Any]) -> list[str]:
    """Return the names in `namespace` except those that IPython itself sets, such as `open` and `Out`."""
    from IPython import get_ipython

    hidden = getattr(get_ipython(), "user_ns_hidden", {})
    return [name for name, value in namespace.items() if name not in hidden or hidden[name] is not value]
