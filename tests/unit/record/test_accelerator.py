# SPDX-License-Identifier: Apache-2.0
"""Detect a device-graph capture without initializing the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddpilot.record.accelerator import captures, is_capturing


@pytest.mark.parametrize("is_initialized", [False, True])
@pytest.mark.parametrize("is_current_stream_capturing", [False, True])
def test_a_device_that_nobody_uses_yet_is_not_asked_for_its_stream(
    is_initialized: bool, is_current_stream_capturing: bool
) -> None:
    """Asking CUDA for its current stream would initialize it."""
    asked = []

    def is_capturing_now() -> bool:
        asked.append(True)
        return is_current_stream_capturing

    module = SimpleNamespace(is_initialized=lambda: is_initialized, is_current_stream_capturing=is_capturing_now)
    assert captures(module) is (is_initialized and is_current_stream_capturing)
    assert asked == [True] * is_initialized


def test_nothing_is_captured_on_the_cpu() -> None:
    """A torch without an accelerator has no graphs."""
    assert not is_capturing()
