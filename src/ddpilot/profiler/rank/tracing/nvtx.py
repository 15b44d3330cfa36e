# SPDX-License-Identifier: Apache-2.0
"""Mark the phases of updates as NVTX ranges, so that Nsight Systems shows them above the kernels."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader as torch_loader

from ddpilot.guard.probe import Notes

COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send", "recv"),
)
"""Functions of torch.distributed that are collectives."""


class NvtxProbe:
    """Opens a range for each phase of the main thread. Without a CUDA device it does nothing, which rank 0 says."""

    name = "NVTX ranges"

    def __init__(self, push: Callable[[str], object] | None = None, pop: Callable[[], object] | None = None) -> None:
        """`push`, `pop`: open and close a range; by default those of CUDA."""
        self._push, self._pop = push or torch.cuda.nvtx.range_push, pop or torch.cuda.nvtx.range_pop
        self._is_on = push is not None or torch.cuda.is_available()
        self._main = threading.main_thread().ident
        self._depth = 0  # of modules

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        if not self._is_on:
            if os.environ.get("RANK", "0") == "0":
                sys.stderr.write("ddpilot: --nvtx: there is no CUDA device, so that no ranges are marked\n")
            return []
        modules = torch.nn.modules.module
        safely = notes.safely
        dist = torch.distributed
        return [
            self._around(notes, torch_loader._BaseDataLoaderIter, "__next__", "data"),
            self._around(notes, torch.autograd, "backward", "backward"),
            self._around(notes, torch, "save", "checkpoint"),
            *(self._around(notes, dist, name, name, (dist.distributed_c10d,)) for name in COLLECTIVES),
            modules.register_module_forward_pre_hook(safely(self._forward_begins)).remove,
            modules.register_module_forward_hook(safely(self._forward_ends), always_call=True).remove,
            register_optimizer_step_pre_hook(safely(self._step_begins)).remove,
            register_optimizer_step_post_hook(safely(self._step_ends)).remove,
        ]

    def _around(
        self, notes: Notes, owner: Any, name: str, label: str, aliases: tuple[Any, ...] = ()
    ) -> Callable[[], None]:
        def begins(*_args: Any, **_kwargs: Any) -> bool:
            return self._begin(label)

        def ends(is_open: bool, *_args: Any, **_kwargs: Any) -> None:
            self._end(is_open)

        return notes.around(owner, name, before=begins, after=ends, aliases=aliases)

    def _begin(self, label: str) -> bool:
        """Open a range, unless a thread other than the main one calls. True if it is open."""
        if threading.get_ident() != self._main:
            return False
        self._push(label)
        return True

    def _end(self, is_open: bool) -> None:
        if is_open and threading.get_ident() == self._main:
            self._pop()

    def _step_begins(self, *_: Any) -> None:  # torch takes what it returns for arguments
        self._begin("optimizer")

    def _step_ends(self, *_: Any) -> None:
        self._end(True)

    def _forward_begins(self, *_: Any) -> None:
        if threading.get_ident() == self._main:
            self._depth += 1
            if self._depth == 1:
                self._push("forward" if torch.is_grad_enabled() else "evaluation")

    def _forward_ends(self, *_: Any) -> None:
        if threading.get_ident() == self._main and self._depth:
            self._depth -= 1
            if not self._depth:
                self._pop()
