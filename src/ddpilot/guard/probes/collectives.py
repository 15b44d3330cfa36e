# SPDX-License-Identifier: Apache-2.0
"""Note collectives that have no effect, or whose result is used before it is available."""

from __future__ import annotations

import dis
import weakref
from collections.abc import Callable
from functools import partial
from os.path import isfile as is_file
from types import CodeType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddpilot.guard.notes import CollectiveNote, NotAwaitedNote, Site
from ddpilot.guard.probe import Notes

_ASYNCHRONOUS = ("all_reduce", "broadcast")
_MAX_LINES = 256
_MAX_NOTED = 16
_MAX_DROPPED = 64
_C10D = "distributed_c10d.py"


class CollectiveProbe:
    """Observes calls of torch.distributed in the user's code, not in libraries, which may do this on purpose."""

    name = "collectives"

    def __init__(self) -> None:
        self._noted: set[tuple[str, str | None, int | None]] = set()
        self._is_dropped: dict[tuple[CodeType, int], bool] = {}
        self._dropped: list[tuple[weakref.ref[torch.Tensor], int, CollectiveNote]] = []
        self._pre_hook: Any = None

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        self._notes = notes
        around = notes.around
        aliases = (distributed_c10d,)
        return [
            self._remove_hook,
            around(distributed_c10d, "_warn_not_in_group", before=self._left_out),
            around(dist, "barrier", after=self._met, aliases=aliases),
            *(around(dist, name, returned=partial(self._started, name), aliases=aliases) for name in _ASYNCHRONOUS),
        ]

    def _remove_hook(self) -> None:
        if self._pre_hook is not None:
            self._pre_hook.remove()

    def _left_out(self, op: str, *_: Any) -> None:
        """Note that this rank is not in the group of `op`, which therefore does nothing; torch is about to warn."""
        frame, called = self._notes.user_call()
        if frame is not None and called is not None and called.co_filename.endswith(_C10D):
            site = self._notes.site(frame)
            if self._is_new("not_member", site):
                self._notes.write("not_member", CollectiveNote(op=op, site=site))

    def _is_new(self, kind: str, site: Site) -> bool:
        """True if `kind` should be noted for this line."""
        key = kind, site.get("file"), site.get("line")
        if key in self._noted or len(self._noted) >= _MAX_NOTED:
            return False
        self._noted.add(key)
        return True

    def _started(self, name: str, _: None, work: Any, *args: Any, **kwargs: Any) -> None:
        tensor = args[0] if args else kwargs.get("tensor")
        if work is None:
            return
        # On a device, waiting for a later collective or for the device covers this one too.
        if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu or len(self._dropped) >= _MAX_DROPPED:
            return
        frame, called = self._notes.user_call()
        if frame is None or called is None or called.co_filename != __file__:
            return  # called by torch or by a library
        key = frame.f_code, frame.f_lasti
        if key not in self._is_dropped:
            if len(self._is_dropped) >= _MAX_LINES:
                return
            self._is_dropped[key] = drops_result(*key)
        if self._is_dropped[key]:
            call = CollectiveNote(op=name, site=self._notes.site(frame))
            self._dropped.append((weakref.ref(tensor), tensor._version, call))
            if self._pre_hook is None:
                self._pre_hook = register_optimizer_step_pre_hook(self._notes.safely(self._before_step))

    def _met(self, *_: Any, **__: Any) -> None:
        """Forget what was started before a barrier: it is complete after it."""
        self._dropped.clear()

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._dropped:
            return
        dropped, self._dropped = self._dropped, []
        gradients = {
            id(one.grad) for group in optimizer.param_groups for one in group["params"] if one.grad is not None
        }
        for reference, version, call in dropped:
            tensor = reference()
            if tensor is None:
                continue
            is_changed = tensor._version != version
            if (is_changed or id(tensor) in gradients) and self._is_new("not_awaited", call["site"]):
                how: Literal["changed", "stepped with"] = "changed" if is_changed else "stepped with"
                self._notes.write("not_awaited", NotAwaitedNote(**call, numel=tensor.numel(), how=how))


def drops_result(code: CodeType, at: int) -> bool:
    """True if the result of the call at byte `at` of `code` is discarded, or assigned to a name that is never read."""
    following = [each for each in dis.get_instructions(code) if each.offset > at and each.opname != "CACHE"]
    if not following:
        return False
    first = following[0]
    if first.opname == "POP_TOP":
        return True
    if first.opname not in ("STORE_FAST", "STORE_NAME"):
        return False
    if first.opname == "STORE_NAME" and not is_file(code.co_filename):
        return False  # a name in a cell can be read in later cells
    name = first.argval
    return not any(_reads(each, name) for each in _codes_of(code))


def _codes_of(code: CodeType) -> list[CodeType]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [code, *(deeper for each in inner for deeper in _codes_of(each))]


def _reads(code: CodeType, name: str) -> bool:
    for each in dis.get_instructions(code):
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if each.opname.startswith("LOAD_") and name in names and each.opname != "LOAD_CONST":
            return True
        if "LOAD_FAST" in each.opname and name in names:  # for example STORE_FAST_LOAD_FAST
            return True
    return False
