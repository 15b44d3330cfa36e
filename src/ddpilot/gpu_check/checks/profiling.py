# SPDX-License-Identifier: Apache-2.0
"""Check that a profile has the times of the device, which it reads without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.gpu_check.catalogue import Answer, Outcome, judge_answers
from ddpilot.gpu_check.checks.accelerator import run_ranks, wait_for
from ddpilot.training.loop import Loop

_BUSY_S, _NUM_TIMED = 0.06, 8
"""Seconds of the forward pass on the device: several times what the host takes to queue an update."""
_NUM_UPDATES, _NUM_FIRST = 16, 6
_MOST_QUEUED = 0.9
"""Part of the device's time in which the host has to have queued all work, if it waited for none."""
_SUM_ERROR, _FORWARD_ERROR = 0.02, 0.25


def profile_has_device_times() -> Outcome:
    """Work of 60 ms is found in the forward pass that queues it, and the updates add up to the clock."""
    return judge_answers(run_ranks(_profile, num_ranks=1))


class _Busy(nn.Module):
    """A layer whose forward pass also queues products that take about `_BUSY_S`."""

    factor: torch.Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        width = 2048 if device.type == "cuda" else 768
        self.layer = nn.Linear(width, 1)
        self.register_buffer("factor", torch.eye(width))
        self.to(device)
        self._queue_products(_NUM_TIMED)
        self.num_products = max(1, round(_BUSY_S / self.time_product()))

    def time_product(self) -> float:
        """Return the seconds of one product on the device."""
        wait_for(self.factor.device)
        begin_s = time.perf_counter()
        self._queue_products(_NUM_TIMED)
        wait_for(self.factor.device)
        return (time.perf_counter() - begin_s) / _NUM_TIMED

    @torch.no_grad()
    def _queue_products(self, num: int) -> Any:
        values: Any = self.factor
        for _ in range(num):
            values = values @ self.factor
        return values

    def forward(self) -> Any:
        """Return a number of the layer, after the products."""
        return self.layer(self._queue_products(self.num_products)).mean()


def _profile() -> Answer:
    loop = Loop(seed=0, progress=False)
    net = _Busy(loop.device)
    begin, end = (torch.Event(loop.device, enable_timing=True) for _ in range(2))
    product_s, begin_s, forward_s = net.time_product(), 0.0, 0.0
    with loop.profile() as profile:
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for update in range(_NUM_UPDATES):
            if update == _NUM_FIRST:
                wait_for(loop.device)
                begin_s, forward_s = time.perf_counter(), 0.0
                begin.record()
            before_s = time.perf_counter()
            loss = model()
            forward_s += time.perf_counter() - before_s
            loss.backward()
            optimizer.step()
        end.record()
        queued_s = time.perf_counter() - begin_s
        wait_for(loop.device)
    took_s, product_s = begin.elapsed_time(end) / 1e3, min(product_s, net.time_product())
    num = _NUM_UPDATES - _NUM_FIRST
    phases = profile.profile.phases
    found_s = float(phases.share("forward")[0, -num:].mean())
    sum_s, busy_s = float(phases.durations_s[0, -num:].sum()), net.num_products * product_s
    holds = (
        phases.clock == loop.device.type
        and abs(sum_s / took_s - 1) <= _SUM_ERROR
        and found_s >= (1 - _FORWARD_ERROR) * busy_s
        and queued_s <= _MOST_QUEUED * took_s
    )
    return holds, (
        f"clock: {phases.clock}; forward of {num} updates: {found_s * 1e3:.2f} ms on the device, whose products alone "
        f"take {busy_s * 1e3:.2f}, {forward_s / num * 1e3:.2f} ms on the host; updates {sum_s / took_s:.3f} of the "
        f"clock's time; all queued after {queued_s / took_s:.0%} of it"
    )
