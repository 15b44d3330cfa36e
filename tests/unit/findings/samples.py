# SPDX-License-Identifier: Apache-2.0
"""Findings that the renderer tests share."""

from __future__ import annotations

from ddpilot.findings.finding import Finding
from ddpilot.user_files import CodeLine

DESYNC = Finding(
    code="DDP201",
    name="desync",
    severity="error",
    summary="collective #214 of the default group differs between ranks",
    evidence=(
        "ranks 0,2,3  all_reduce, DDP gradient bucket 0   train.py:88  loss.backward()",
        "rank 1       barrier                             train.py:91  dist.barrier()",
        "in common until #213: broadcast of DDP buffers, train.py:85",
    ),
    why="the barrier at train.py:91 is inside `if rank == 1:` (train.py:90); the others went on to backward",
    fix="move it out of the branch, so that every rank calls it",
    source="https://pytorch.org/docs/stable/distributed.html",
)
SMALL_BATCH = Finding(
    code="DDP305",
    name="small_batch",
    severity="warning",
    summary="BatchNorm sees 2 samples per rank",
    ranks=(0, 1, 2, 3),
    place=CodeLine(file="model.py", line=12, function="Net.__init__", text="self.bn = nn.BatchNorm2d(8)"),
    fix="convert it with SyncBatchNorm",
)
HOSTILE = Finding(
    code="<b>",
    name="</div><script>alert(1)</script>",
    severity="info",
    summary="a & b\x1b[2J",
    ranks=(0,),
    place=CodeLine(file='"><img src=x onerror=alert(1)>', line=1, text="if a < b: pass"),
    evidence=("<script>alert(2)</script>", "two\nlines"),
    why="<i>why</i>",
    fix="<a href='x'>fix</a>",
    source="javascript:alert(3)",
)
