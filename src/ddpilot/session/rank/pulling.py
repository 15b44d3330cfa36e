# SPDX-License-Identifier: Apache-2.0
"""Evaluate expressions on a rank and send their values to the parent, or the reason why this is not possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddpilot.errors import ShipError, did_you_mean
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.session.own_names import own_names
from ddpilot.session.protocol.variables import find_incomplete
from ddpilot.session.rank.session_group import SessionGroup
from ddpilot.session.refusals import MISSING, refuse


def pack_pulled(expressions: Sequence[str], names: dict[str, Any]) -> tuple[int | None, dict[str, str] | None]:
    """Return a parcel (a file descriptor) with the values of `expressions`, and None; or None and a refusal.

    Objects shared by several values, such as parameters of a model and its optimizer, are also shared in the parent.
    Exceptions raised by an expression propagate.
    """
    values: dict[str, Any] = {}
    for expression in expressions:
        value, refusal = _evaluate(expression, names)
        if refusal is not None:
            return None, {**refusal, "expression": expression}
        values[expression] = value
    if (incomplete := find_incomplete(values)) is not None:
        fix = f"Pull both at once, as in `%ddp pull {incomplete.kind} {incomplete.name}`, or its `state_dict()`"
        return None, {**refuse(incomplete.found.format(verb="pulled"), fix), "expression": incomplete.name}
    try:
        parcel, _ = ship("ddpilot-pull", values, [values[each] for each in expressions], did="", known=[])
    except ShipError as error:
        return None, refuse(error.found, error.fix, path=error.path)
    return parcel, None


def _evaluate(expression: str, names: dict[str, Any]) -> tuple[Any, dict[str, str] | None]:
    """Return the value of the expression and None, or None and a refusal."""
    if expression.isidentifier() and expression not in names:
        return None, refuse(MISSING, did_you_mean(expression, own_names(names), num=3))
    try:
        value = eval(expression, names)
    except NameError as error:
        return None, refuse(str(error))
    except AttributeError as error:
        model: Any = error.obj
        if DistributedDataParallel not in type(model).__mro__:
            raise
        is_inside = hasattr(model.module, error.name or "")
        fix = f"The model in it has one: write `.module.{error.name}` in place of `.{error.name}`" if is_inside else ""
        return None, refuse(str(error), fix)
    if isinstance(value, SessionGroup):
        return None, refuse("it is the session's own and stays on its rank", "Pull what it gives, such as `group.rank`")
    if isinstance(value, DistributedDataParallel):
        return None, refuse(
            "it is a DDP model, and its process group stays on its rank",
            f"Pull the module in it, `{expression}.module`, or its weights, `{expression}.module.state_dict()`",
        )
    return value, None
