# SPDX-License-Identifier: Apache-2.0
"""Entry point of a rank's process, which the parent can name without importing the kernel."""

from __future__ import annotations

from ddpilot.session.protocol.entry_points import KernelStart


def serve(start: KernelStart) -> None:
    """Run a kernel until the session ends."""
    from ddpilot.session.rank.main import serve_kernel

    serve_kernel(start)
