# SPDX-License-Identifier: Apache-2.0
"""Note which parameters got no gradient when DDP fails because of it.

torch's error gives their indices; the note has their names, and those that were frozen after the model was wrapped.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.guard.probe import Notes

_MAX_NAMES = 20
_NUMBERS = re.compile(r"indices which did not receive grad for rank \d+:((?: \d+)+)")


class FrozenProbe:
    """Acts when a forward of DDP raises; until then it remembers the trainable parameters of wrapped models."""

    name = "parameters without gradients"

    def __init__(self) -> None:
        self._trainable: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
        self._site: dict[str, Any] = {}

    def install(self, notes: Notes) -> Callable[[], None]:
        """Install the probe, see `Probe.install`."""

        def wrapped(_: object, returned: bool, __: object, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
            if returned:
                parameters = ddp.module.named_parameters()
                left_out = ddp.parameters_to_ignore
                self._trainable[ddp] = [name for name, one in parameters if one.requires_grad and name not in left_out]

        def freezes(_: Any, requires_grad: bool = True) -> None:
            if not requires_grad and self._trainable:
                self._site = notes.site()

        def failed(_: object, __: bool, ___: object, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
            now = dict(ddp.module.named_parameters())
            known = self._trainable.get(ddp, [])
            if names := [name for name in known if name in now and not now[name].requires_grad]:
                notes.write("frozen", names=names[:_MAX_NAMES], num=len(names), site=self._site or notes.site())
            elif names := _named_by(sys.exc_info()[1], known):
                notes.write("left_out", names=names[:_MAX_NAMES], num=len(names), site=notes.site())

        undo = [
            notes.around(DistributedDataParallel, "__init__", after=wrapped),
            notes.around(DistributedDataParallel, "forward", raised=failed),
            notes.around(nn.Module, "requires_grad_", before=freezes),
        ]

        def uninstall() -> None:
            for one in undo:
                one()

        return uninstall


def _named_by(error: BaseException | None, known: list[str]) -> list[str]:
    """Return the names of the parameters whose indices in `known` DDP's error lists."""
    found = _NUMBERS.search(str(error)) if error is not None else None
    numbers = map(int, found[1].split()) if found else ()
    return [known[number] for number in numbers if number < len(known)]
