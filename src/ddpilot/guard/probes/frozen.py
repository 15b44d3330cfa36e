# SPDX-License-Identifier: Apache-2.0
"""Notes which parameters were frozen after their model was wrapped, when DDP fails for want of their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.guard.probe import Notes

_MAX_NAMES = 20


class FrozenProbe:
    """Looks when a forward of DDP raises; until then it remembers what could be trained when a model was wrapped."""

    name = "layers frozen after wrapping"

    def __init__(self) -> None:
        self._trainable: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
        self._site: dict[str, Any] = {}

    def install(self, notes: Notes) -> Callable[[], None]:
        """As `Probe.install`."""

        def wrapped(_: object, returned: bool, __: object, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
            if returned:
                parameters = ddp.module.named_parameters()
                self._trainable[ddp] = [name for name, parameter in parameters if parameter.requires_grad]

        def freezes(_: Any, requires_grad: bool = True) -> None:
            if not requires_grad and self._trainable:
                self._site = notes.site()

        def ran(_: object, returned: bool, __: object, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
            if returned:
                return
            now = dict(ddp.module.named_parameters())
            names = [name for name in self._trainable.get(ddp, ()) if name in now and not now[name].requires_grad]
            if names:
                notes.write("frozen", names=names[:_MAX_NAMES], num=len(names), site=self._site or notes.site())

        undo = [
            notes.around(DistributedDataParallel, "__init__", after=wrapped),
            notes.around(DistributedDataParallel, "forward", after=ran),
            notes.around(nn.Module, "requires_grad_", before=freezes),
        ]

        def uninstall() -> None:
            for one in undo:
                one()

        return uninstall
