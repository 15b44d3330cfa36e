# SPDX-License-Identifier: Apache-2.0
"""What a loop says to its user while it goes on, and the errors of a batch."""

from __future__ import annotations

import warnings

from ddpilot.errors import DataError
from ddpilot.findings.as_text import render_text
from ddpilot.findings.finding import Finding
from ddpilot.group.protocol import GroupLike
from ddpilot.training.grouping import CurrentBatch

_STACK_LEVEL = 4


def say_findings(findings: tuple[Finding, ...], group: GroupLike) -> None:
    """Warn of `findings` on rank 0, as text."""
    if findings and group.is_rank_zero:
        warnings.warn(render_text(findings), stacklevel=_STACK_LEVEL)


def say_dropped(group: GroupLike) -> None:
    """Warn on rank 0 that gradients of an unfinished accumulation group were dropped."""
    if group.is_rank_zero:
        warnings.warn(
            "a loop over batches() was left in the middle of an accumulation group: the gradients of that group are "
            "dropped, since they were not synchronised. Leave it where loop.is_update is True.",
            stacklevel=_STACK_LEVEL,
        )


def never_had_a_sample(batch: CurrentBatch, group: GroupLike) -> DataError:
    """The error of a rank whose part of a stream is empty from the start."""
    return DataError(
        f"beginning epoch {batch.epoch}",
        found="this rank's part of the stream is empty, so what a batch looks like is not known here",
        fix="Let the dataset give every part something, or use fewer ranks or workers.",
        rank=group.rank,
    )
