# SPDX-License-Identifier: Apache-2.0
"""A value of a rank on its way to the parent, or why it cannot go there."""

from __future__ import annotations

import difflib
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddpilot.errors import ShipError
from ddpilot.launching.shipping.blame import ship
from ddpilot.session.rank.lazy import SessionGroup
from ddpilot.session.refusals import MISSING, refuse


def pack_pulled(expression: str, names: dict[str, Any]) -> tuple[list[int], dict[str, str] | None]:
    """The descriptors of a parcel with the value of `expression`, and None; or none, and a refusal.

    Raises what the expression itself raises.
    """
    if expression.isidentifier() and expression not in names:
        near = difflib.get_close_matches(expression, names, 3)
        return [], refuse(MISSING, f"Did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else "")
    try:
        value = eval(expression, names)
    except NameError as error:
        return [], refuse(str(error))
    except AttributeError as error:
        model: Any = error.obj
        if DistributedDataParallel not in type(model).__mro__:
            raise
        is_inside = hasattr(model.module, error.name or "")
        fix = f"The model in it has one: write `.module.{error.name}` in place of `.{error.name}`" if is_inside else ""
        return [], refuse(str(error), fix)
    if isinstance(value, SessionGroup):
        return [], refuse("it is the session's own and stays on its rank", "Pull what it gives, such as `group.rank`")
    if isinstance(value, DistributedDataParallel):
        return [], refuse(
            "it is a DDP model, and its process group stays on its rank",
            f"Pull the module in it, `{expression}.module`, or its weights, `{expression}.module.state_dict()`",
        )
    try:
        parcel, _ = ship("ddpilot-pull", {expression: value}, value, did="", known=[])
    except ShipError as error:
        return [], refuse(error.found, error.fix, path=error.path)
    return parcel, None
