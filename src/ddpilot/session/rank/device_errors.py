# SPDX-License-Identifier: Apache-2.0
"""Errors of a device that stay: after an assertion in a kernel, or an illegal address, nothing runs there any more."""

from __future__ import annotations

import torch


def find_device_error(device: torch.device) -> str:
    """What `device` answers to every call in this process; "" if it works, or was not used. Does not wait for it.

    A kernel that is still queued may fail later.
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
