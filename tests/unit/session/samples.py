# SPDX-License-Identifier: Apache-2.0
"""Ranks in every state, at the time `NOW_S`."""

from __future__ import annotations

from ddpilot.session.status import CollectiveStatus, RankStatus

NOW_S = 10_000.0

WAITING = RankStatus(
    rank=0,
    state="busy",
    since_s=NOW_S - 12.4,
    pid=4711,
    cell=7,
    collective=CollectiveStatus(op="all_reduce", since_s=NOW_S - 4.9, site="Cell In[7]:3", seq=12),
    cpu_percent=99.6,
    memory_bytes=212_400_000,
)
IDLE = RankStatus(rank=1, state="idle", since_s=NOW_S - 90, pid=4712, cpu_percent=0.2, memory_bytes=45_000_000)
DEAD = RankStatus(rank=2, state="dead", since_s=NOW_S - 3, reason="was killed by SIGKILL (signal 9)")
BUSY = RankStatus(
    rank=3, state="busy", since_s=NOW_S - 305, pid=14713, cell=7, cpu_percent=189.0, memory_bytes=1_412_000_000
)
HOSTILE = RankStatus(
    rank=5,
    state="dead",
    since_s=NOW_S,
    reason='<script>alert(1)</script> & "quoted" \x1b[31m\nnext line',
)
ON_GPU = RankStatus(
    rank=0,
    state="busy",
    since_s=NOW_S - 12,
    pid=4711,
    cell=7,
    collective=CollectiveStatus(op="all_gather", since_s=NOW_S - 8, site="fit.py:8", is_watched=False),
    cpu_percent=100.0,
    memory_bytes=2_200_000_000,
    gpu_percent=100.0,
    gpu_memory_bytes=41_300_000_000,
)
