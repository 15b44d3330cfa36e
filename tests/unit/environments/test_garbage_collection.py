# SPDX-License-Identifier: Apache-2.0
"""The garbage collector is paused and resumed, unless it was disabled before."""

from __future__ import annotations

import gc

from ddpilot.environments.garbage_collection import collector_paused


def test_collector_paused_leaves_a_disabled_collector_disabled() -> None:
    """The code that disabled it enables it again."""
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
