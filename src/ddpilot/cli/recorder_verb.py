# SPDX-License-Identifier: Apache-2.0
"""``ddpilot build-recorder``: compile the C++ part of recording."""

from __future__ import annotations

from ddpilot.record.collectives import native


def build_recorder() -> str:
    """Compile the recorder for this user's torch and Python if necessary, and return a line with its path.

    Raises `RecordError` if it cannot be compiled.
    """
    known = native.built_path()
    is_there = known is not None and known.exists()
    path = native.build()
    return f"the compiled recorder {'was there already' if is_there else 'is built'}: {path}\n"
