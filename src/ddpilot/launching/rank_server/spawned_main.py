# SPDX-License-Identifier: Apache-2.0
"""The ``__main__`` of processes that a rank starts with multiprocessing's "spawn" or "forkserver" method.

They look up classes and functions from notebook cells in ``__main__``, so this module opens the rank's parcel again.
"""

from __future__ import annotations

import os
from typing import Any


def _shipped_definitions() -> dict[str, Any]:
    from ddpilot.launching.rank_server.rank import PARCEL_VARIABLE
    from ddpilot.launching.shipping.memory_file import map_private
    from ddpilot.launching.shipping.pickling import importable_from_main, open_parcel

    fd = os.open(os.environ[PARCEL_VARIABLE], os.O_RDONLY)
    try:
        mapped = map_private(fd)
    finally:
        os.close(fd)
    _, definitions = open_parcel(mapped)
    return importable_from_main(definitions)


if __name__ == "__mp_main__":
    globals().update(_shipped_definitions())
