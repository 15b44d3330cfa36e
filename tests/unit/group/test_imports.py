# SPDX-License-Identifier: Apache-2.0
"""What a process that only launches may import without paying for torch."""

from __future__ import annotations

import subprocess
import sys


def test_group_modules_for_the_launching_half_load_no_torch() -> None:
    """Counting devices, checking addresses and decorating functions need no torch."""
    modules = "ddpilot.environments.nvml, ddpilot.group.address, ddpilot.group.decorators"
    code = f"import {modules}, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
