# SPDX-License-Identifier: Apache-2.0
"""Release memory between cells, and drop references through which a failed cell would keep tensors alive."""

from __future__ import annotations

import functools
import gc
import sys
import traceback
import warnings
from typing import Any

import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ddpilot.session.rank.error_report import find_device_error
from ddpilot.session.rank.interrupts import uninterrupted

_MAX_UNUSED_PART = 8
_LAST = ("last_type", "last_value", "last_traceback", "last_exc")
_GRACE_S = 1.0
"""Seconds that all workers of an iteration together have to finish their current samples before they are terminated."""


def release_memory(device: torch.device, *, keep_cache: bool, has_failed: bool) -> None:
    """Collect garbage and, unless `keep_cache`, return unused cached memory of `device` if that pays off."""
    gc.collect()
    if keep_cache or device.type == "cpu" or find_device_error(device):
        return
    module = torch.get_device_module(device)
    is_initialized = getattr(module, "is_initialized", None)
    if is_initialized is not None and not is_initialized():
        return
    if pays_to_empty(has_failed, *_read_memory(module, device)) and hasattr(module, "empty_cache"):
        module.empty_cache()


def pays_to_empty(has_failed: bool, unused_bytes: int | None, total_bytes: int) -> bool:
    """True after a cell that failed, or if more than an eighth of the device's memory is cached and unused.

    Emptying the cache synchronizes the device and makes the next cell allocate again, which takes tens of milliseconds.
    `unused_bytes`: None if not known.
    """
    return has_failed or unused_bytes is None or unused_bytes > total_bytes / _MAX_UNUSED_PART


def _read_memory(module: Any, device: torch.device) -> tuple[int | None, int]:
    if not all(hasattr(module, name) for name in ("memory_reserved", "memory_allocated", "mem_get_info")):
        return None, 0
    unused_bytes = module.memory_reserved(device) - module.memory_allocated(device)
    return unused_bytes, module.mem_get_info(device)[1]


def forget_error(shell: Any) -> None:
    """Drop the last exception stored by Python and IPython, whose frames hold the cell's tensors.

    An exception that the user's code has stored is kept, but the variables of its frames are cleared.
    """
    with warnings.catch_warnings():
        # A coroutine that the failed cell did not await is deleted here; the warning would name a line of this module.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        _clear_chain(getattr(sys, "last_value", None), set())
    for name in _LAST:
        if hasattr(sys, name):
            delattr(sys, name)
    result = shell.last_execution_result
    if result is not None:
        result.error_in_exec = result.error_before_exec = None
    for handler in (shell.InteractiveTB, shell.SyntaxTB):
        handler.tb = None


def _clear_chain(error: BaseException | None, seen: set[int]) -> None:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    traceback.clear_frames(error.__traceback__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        _ = frame.f_locals  # formatting the error has cached the variables here; this refreshes the cache
    _clear_chain(error.__cause__, seen)
    _clear_chain(error.__context__, seen)


def end_workers_soon() -> None:
    """Give the workers of an iterator that is deleted `_GRACE_S` together, where torch gives each of them 5 s.

    Deleting an iterator waits for its workers: with two busy workers, an error in the loop would be shown, and an
    interrupt would take effect, only after ten seconds. An iteration that is completed is not affected.
    """
    original = _MultiProcessingDataLoaderIter.__del__

    @functools.wraps(original)
    def end(iterator: _MultiProcessingDataLoaderIter) -> None:
        before = _utils.MP_STATUS_CHECK_INTERVAL
        _utils.MP_STATUS_CHECK_INTERVAL = _GRACE_S / max(1, len(getattr(iterator, "_workers", ())))
        try:
            with uninterrupted():  # exceptions in a finalizer are printed and ignored
                original(iterator)
        finally:
            _utils.MP_STATUS_CHECK_INTERVAL = before

    _MultiProcessingDataLoaderIter.__del__ = end  # type: ignore[method-assign]
