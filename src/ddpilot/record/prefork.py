# SPDX-License-Identifier: Apache-2.0
"""Imported by the rank server before it forks, to do once what every rank would do when it starts to record (0.1 s)."""

from __future__ import annotations

import sysconfig

from ddpilot.record.collectives.start_stop import connect, plan_operations, start_recording

PREPARED = (start_recording, connect, plan_operations(), sysconfig.get_paths())
