# SPDX-License-Identifier: Apache-2.0
"""`ddpilot build-recorder`."""

from __future__ import annotations

from ddpilot.record import native


def build_recorder() -> str:
    """Build the compiled part of recording for this user's torch and Python, unless it is there; says where it is.

    Raises `RecordError` where it cannot be built.
    """
    known = native.built_path()
    is_there = known is not None and known.exists()
    path = native.build()
    return f"the compiled recorder {'was there already' if is_there else 'is built'}: {path}\n"
