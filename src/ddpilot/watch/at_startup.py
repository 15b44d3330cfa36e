# SPDX-License-Identifier: Apache-2.0
"""Imported at Python's startup if DDPILOT_WATCH is set, by `ddpilot_watch.pth` next to the package."""

from __future__ import annotations

import os

# Import nothing in a process that is not a rank, such as the launcher itself.
if not {"RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"}.isdisjoint(os.environ):
    from ddpilot.watch.external.instrumentation import enable_from_environment

    enable_from_environment()
