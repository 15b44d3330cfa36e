# SPDX-License-Identifier: Apache-2.0
"""Note what is wrapped in DDP or DataParallel, and parameters without a gradient when DDP fails because of them."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.guard.notes import ParametersNote, Site, SiteNote, WrappingNote
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.process_groups import describe_group, sequence_number

_MAX_PARAMETERS = 1024


class WrapProbe:
    """Observes models before DDP compares them: their parameters, and the buffers that DDP broadcasts."""

    name = "models to be wrapped"

    def install(self, notes: Notes) -> list[Callable[[], None]]:

        def before(_ddp: Any, module: nn.Module, *_args: Any, **named: Any) -> None:
            group = named.get("process_group") or dist.group.WORLD
            if group is None or not dist.is_initialized():
                return
            described = [
                [name, list(one.shape), str(one.dtype).removeprefix("torch."), one.requires_grad]
                for name, one in (*module.named_parameters(), *module.named_buffers())
            ]
            note = WrappingNote(
                group=describe_group(group),
                at=sequence_number(group),
                parameters=described[:_MAX_PARAMETERS],
                num_parameters=len(described),
                site=notes.site(),
            )
            notes.write("wrapping", note)

        ddp: Any = DistributedDataParallel
        return [notes.around(ddp, "__init__", before=before)]


class DataParallelProbe:
    """Observes `nn.DataParallel`; notes each model that trains through it once."""

    name = "nn.DataParallel"

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def install(self, notes: Notes) -> list[Callable[[], None]]:

        def before(model: Any, *_args: Any, **_kwargs: Any) -> None:
            if torch.is_grad_enabled() and model.training and id(model) not in self._seen and len(self._seen) < 64:
                self._seen.add(id(model))
                notes.write("data_parallel", SiteNote(site=notes.site()))

        return [notes.around(nn.DataParallel, "forward", before=before)]


_MAX_NAMES = 20
_NAMED_NUMBERS = re.compile(r"indices which did not receive grad for rank \d+:((?: \d+)+)")


class FrozenProbe:
    """Acts when a forward of DDP raises; until then it remembers the trainable parameters of wrapped models."""

    name = "parameters without gradients"

    def __init__(self) -> None:
        self._trainable: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
        self._site: Site = {}

    def install(self, notes: Notes) -> list[Callable[[], None]]:

        def wrapped(_: object, returned: bool, __: object, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
            if returned:
                parameters = ddp.module.named_parameters()
                left_out = ddp.parameters_to_ignore
                self._trainable[ddp] = [name for name, one in parameters if one.requires_grad and name not in left_out]

        def freezes(_: Any, requires_grad: bool = True) -> None:
            if not requires_grad and self._trainable:
                self._site = notes.site()

        def write(kind: str, names: list[str], site: Site) -> None:
            notes.write(kind, ParametersNote(names=names[:_MAX_NAMES], num=len(names), site=site))

        def failed(_: object, __: bool, ___: object, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
            now = dict(ddp.module.named_parameters())
            known = self._trainable.get(ddp, [])
            if names := [name for name in known if name in now and not now[name].requires_grad]:
                write("frozen", names, self._site or notes.site())
            elif names := _named_by(sys.exc_info()[1], known):
                write("left_out", names, notes.site())

        return [
            notes.around(DistributedDataParallel, "__init__", after=wrapped),
            notes.around(DistributedDataParallel, "forward", raised=failed),
            notes.around(nn.Module, "requires_grad_", before=freezes),
        ]


def _named_by(error: BaseException | None, known: list[str]) -> list[str]:
    """Return the names of the parameters whose indices in `known` DDP's error lists."""
    found = _NAMED_NUMBERS.search(str(error)) if error is not None else None
    numbers = map(int, found[1].split()) if found else ()
    return [known[number] for number in numbers if number < len(known)]
