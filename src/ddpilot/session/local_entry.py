# SPDX-License-Identifier: Apache-2.0
"""The function that a rank process is launched with; the parent can name it without loading a kernel."""

from __future__ import annotations

from ddpilot.session.rank.start import KernelStart


def serve(start: KernelStart) -> None:
    """Be a kernel until the session ends."""
    from ddpilot.session.rank.main import serve_kernel

    serve_kernel(start)
