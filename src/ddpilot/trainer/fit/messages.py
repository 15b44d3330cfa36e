# SPDX-License-Identifier: Apache-2.0
"""What rank 0 prints in a fit: rows, stops, parameters that are not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpilot.trainer.core import Position
from ddpilot.trainer.history import measured
from ddpilot.trainer.run import Run
from ddpilot.training.loop import Loop
from ddpilot.training.models.optimizers import ShardedState

_REASONS = {"SIGINT": "interrupted", "time": "`max_time_s` has elapsed", "asked": "a callback requested it"}


def render_row(row: dict[str, Any], num_epochs: int | None) -> str:
    """Format a row of an epoch: "epoch 0 (1 of 3): loss 0.4321, val_accuracy 0.9 (1.2 s)"."""
    total = "" if num_epochs is None else f" ({row['epoch'] + 1} of {num_epochs})"
    return f"epoch {row['epoch']}{total}: {_render_numbers(row)}"


def render_interval(row: dict[str, Any], max_updates: int | None) -> str:
    """Format a row of an interval: "update 500 of 50000 (epoch 0): loss 0.4321, val_accuracy 0.9 (1.2 s)"."""
    total = "" if max_updates is None else f" of {max_updates}"
    return f"update {row['update']}{total} (epoch {row['epoch']}): {_render_numbers(row)}"


def _render_numbers(row: dict[str, Any]) -> str:
    numbers = [f"{name} {value:.4g}" for name, value in measured(row).items()]
    return f"{', '.join(numbers)} ({row['seconds']:.1f} s)"


def report_stop(loop: Loop) -> None:
    """Report where and why the fit stopped before its end, if it did."""
    if loop.should_stop:
        where = f" in the middle of epoch {loop.epoch}" if loop.next_batch else ""
        why = ", ".join(_REASONS.get(reason, reason) for reason in loop.stop_reasons)
        loop.print(f"stopped after update {loop.num_updates}{where} ({why})", flush=True)


def report_skipped_rest(loop: Loop, position: Position, data: Mapping[str, Any]) -> None:
    """Report that the rest of an epoch is skipped, since the fit has other data than the one before."""
    before, epoch = position.data, position.epoch
    names = [name for name in ("dataset_length", "global_batch_size") if before.get(name) != data.get(name)]
    changed = ", ".join(f"{name} {before.get(name)} -> {data.get(name)}" for name in names) or "their order"
    loop.print(
        f"skipping the rest of epoch {epoch} (from batch {position.next_batch}), as the training data changed "
        f"({changed}): starting epoch {epoch + 1}",
        flush=True,
    )


def report_untrained(run: Run) -> None:
    """Report trainable parameters that no optimizer holds: frozen when it was created, and unfrozen since."""
    if any(isinstance(one, ShardedState) for one in run.optimizers.values()):  # it holds parameters in its own way
        return
    held = {id(p) for one in run.optimizers.values() for group in one.param_groups for p in group["params"]}
    left = [name for name, p in run.model.named_parameters() if p.requires_grad and id(p) not in held]
    if left and left != run.left_out:
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        run.loop.print(
            f"ddpilot: no optimizer has {', '.join(left[:4])}{more}, which are not frozen: they will not be trained. "
            "Pass them to the optimizer, or freeze them.",
            flush=True,
        )
    run.left_out = left
