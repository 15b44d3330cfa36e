# SPDX-License-Identifier: Apache-2.0
"""Detect persistent device errors: after a device-side assertion or an illegal address, every further call fails."""

from __future__ import annotations

import torch


def find_device_error(device: torch.device) -> str:
    """Return the error with which `device` answers every call in this process; "" if it works, or was not used.

    Does not wait for the device: a kernel that is still queued may fail later.
    """
    if device.type == "cpu":
        return ""
    module = torch.get_device_module(device)
    for name, wanted in (("is_initialized", True), ("is_current_stream_capturing", False)):
        ask = getattr(module, name, None)
        if ask is not None and bool(ask()) is not wanted:
            return ""
    try:
        torch.accelerator.current_stream(device).query()
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    return ""
