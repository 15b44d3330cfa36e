# SPDX-License-Identifier: Apache-2.0
"""Detect that the current thread captures a device graph, such as a CUDA graph."""

from __future__ import annotations

import functools
from typing import Any


def is_capturing() -> bool:
    """True if the current stream of this thread captures a device graph.

    During a capture, querying an event, waiting, or reading a generator raises an error and invalidates the capture,
    and each kernel that is launched becomes part of the user's graph. False on devices without graphs.
    """
    module = _device_module()
    return module is not None and captures(module)


def captures(module: Any) -> bool:
    """Same as `is_capturing`, for the device of `module`, such as `torch.cuda`. Does not initialize the device."""
    return bool(module.is_initialized() and module.is_current_stream_capturing())


@functools.cache
def _device_module() -> Any:
    """Return the module of this torch build's accelerator; None if it has no accelerator, or one without graphs."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    return module if hasattr(module, "is_current_stream_capturing") and hasattr(module, "is_initialized") else None
