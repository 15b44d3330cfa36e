# SPDX-License-Identifier: Apache-2.0
"""Show updates in other tools: a window of torch.profiler, for Perfetto, and NVTX ranges, for Nsight Systems."""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import dataloader as torch_loader

from ddpilot.guard.probe import Notes
from ddpilot.profiler.rank.node_clocks import name_clock
from ddpilot.profiler.spans_file import RankOptions
from ddpilot.profiler.traces import CLOCK_KEY, trace_path

COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send", "recv"),
)
"""Functions of torch.distributed that are collectives."""


class TraceWindow:
    """torch.profiler for some updates after the first ones; it slows these down, so that phases leave them out."""

    def __init__(self, folder: Path, rank: int, options: RankOptions) -> None:
        self._folder, self._rank, self._options = folder, rank, options
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=options.wait, warmup=options.warm_up, active=options.active, repeat=options.repeat),
            on_trace_ready=self._write,
            profile_memory=options.memory,
        )
        self._num_updates = self._num_written = 0
        self._last_s = 0.0
        self._durations_s: dict[bool, list[float]] = {True: [], False: []}
        self._profile.start()

    def _write(self, done: Any) -> None:
        """Write the trace of a cycle."""
        done.export_chrome_trace(str(trace_path(self._folder, self._rank, self._num_written)))
        self._num_written += 1

    def _note_clock(self) -> None:
        """Compare the wall clock, of which a trace's times are, with CLOCK_MONOTONIC; while updates are recorded."""
        ahead_ns = time.time_ns() - time.monotonic_ns()
        about = json.dumps({"name": name_clock(), "wall_minus_monotonic_ns": ahead_ns})
        self._profile.add_metadata_json(CLOCK_KEY, about)

    @property
    def _is_kept(self) -> bool:
        """True in updates whose trace is kept."""
        options = self._options
        cycle, place = divmod(self._num_updates, options.wait + options.warm_up + options.active)
        return cycle < options.repeat and place >= options.wait + options.warm_up

    @property
    def is_recording(self) -> bool:
        """True while updates are slower because they are recorded."""
        options = self._options
        cycle, place = divmod(self._num_updates, options.wait + options.warm_up + options.active)
        if cycle == 0 or place:
            return cycle < options.repeat and place >= options.wait
        return cycle <= options.repeat  # in the first update after a cycle its trace is written

    def end_update(self) -> None:
        """Call at the end of each update. The file is written when the last one has ended."""
        now_s = time.perf_counter()
        if self._num_updates:
            self._durations_s[self.is_recording].append(now_s - self._last_s)
        if self._is_kept:
            self._note_clock()
        self._num_updates += 1
        self._profile.step()
        self._last_s = now_s

    @property
    def slow_down(self) -> float | None:
        """How many times as long recorded updates took as the others; None if there were none of either."""
        recorded_s, others_s = self._durations_s[True], self._durations_s[False]
        return statistics.median(recorded_s) / statistics.median(others_s) if recorded_s and others_s else None

    def stop(self) -> None:
        """Stop, and write what was recorded if the program ends within the window."""
        self._profile.stop()


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
