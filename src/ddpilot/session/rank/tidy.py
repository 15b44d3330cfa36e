# SPDX-License-Identifier: Apache-2.0
"""Give memory back between cells: nothing that a failed cell left may keep tensors alive."""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from typing import Any

import torch

_LAST = ("last_type", "last_value", "last_traceback", "last_exc")


def tidy(keep_cache: bool) -> None:
    """Collect garbage and, unless `keep_cache`, return what CUDA's allocator keeps for later."""
    gc.collect()
    if not keep_cache and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def forget_error(shell: Any) -> None:
    """Drop what Python and IPython remember of the last exception; its frames hold the cell's tensors.

    An exception that the user's code has kept stays, without the variables of the frames that it went through.
    """
    with warnings.catch_warnings():
        # A coroutine that the failed cell never awaited ends here, and Python would name a line of this module.
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
        _ = frame.f_locals  # what formatted the error has made a copy here, which this makes anew: empty
    _clear_chain(error.__cause__, seen)
    _clear_chain(error.__context__, seen)
