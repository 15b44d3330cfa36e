# SPDX-License-Identifier: Apache-2.0
"""On the path of every Python that tests start: it collects garbage rarely, and none at exit.

A process that has imported torch takes 0.4 s to exit because its last collections visit all objects of torch, and 1 s
if it has imported torch's compiler, as every optimizer does. Tests of how processes exit take `collects_at_exit`.

DDPILOT_TESTS_WITHOUT names packages, with commas, that look as if they were not installed: Lightning imports all that
torchmetrics can use and finds, which takes each process 2 s.
"""

from __future__ import annotations

import os

if os.environ.get("DDPILOT_TESTS_COLLECT") == "rarely":
    import atexit
    import gc
    import sys

    if "DDPILOT_RANK_SERVER" not in os.environ:  # else ranks that are forked from it would collect rarely as well
        gc.set_threshold(50_000, 20, 50)
    atexit.register(gc.freeze)
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # see tests/conftest.py

if "DDPILOT_RANK_SERVER" in os.environ and os.environ.get("DDPILOT_TESTS_PID") == str(os.getppid()):
    import pytest  # noqa: F401 - ranks that tests launch import modules of tests, which import it: 0.1 s each

if "DDPILOT_TESTS_WITHOUT" in os.environ:
    import sys
    from importlib import metadata

    _absent, _version = os.environ["DDPILOT_TESTS_WITHOUT"].split(","), metadata.version

    def _version_of_what_is_there(distribution_name: str) -> str:
        if distribution_name in _absent:
            raise metadata.PackageNotFoundError(distribution_name)
        return _version(distribution_name)

    metadata.version = _version_of_what_is_there
    for _name in _absent:
        sys.modules.setdefault(_name, None)  # type: ignore[arg-type]  # the import fails, as without the package
