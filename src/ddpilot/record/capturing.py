# SPDX-License-Identifier: Apache-2.0
"""Detect that the current thread captures a device graph, such as a CUDA graph."""

from __future__ import annotations

import functools
from typing import Any


def is_capturing() -> bool:
    """True if the current stream of this thread captures a device graph.

    Querying an event, waiting, or reading a generator then raises an error and spoils the capture, and each kernel that
    is started becomes a part of the user's graph. False on devices that have no graphs.
    """
    module = _device_module()
    return module is not None and captures(module)


def captures(module: Any) -> bool:
    """As `is_capturing`, for the device whose module is `module`, such as `torch.cuda`. Initializes nothing."""
    return bool(module.is_initialized() and module.is_current_stream_capturing())


@functools.cache
def _device_module() -> Any:
    """The module of the accelerator that this torch is built for; None if it has none, or one without graphs."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    return module if hasattr(module, "is_current_stream_capturing") and hasattr(module, "is_initialized") else None
