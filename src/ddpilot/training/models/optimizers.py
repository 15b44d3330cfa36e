# SPDX-License-Identifier: Apache-2.0
"""Full state of an optimizer for checkpoints: the same whether its state is sharded over ranks or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer

from ddpilot.errors import MismatchedCheckpointError


@runtime_checkable
class Divided(Protocol):
    """An optimizer whose state is sharded: each rank holds the state of its own parameters."""

    def gather_state(self) -> dict[str, Any]:
        """Return the state of all ranks. Collective."""


def full_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the unsharded `optimizer.state_dict()`, complete on rank 0. Collective if the optimizer is sharded.

    The other ranks get the same groups and, for a sharded optimizer, no state. Tensors from other ranks are on the CPU;
    a rank's own tensors are not copied: the next update changes them.
    """
    return optimizer.gather_state() if isinstance(optimizer, Divided) else optimizer.state_dict()


def load_full_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the result of `full_state` from rank 0, at any world_size, sharded or not. Not collective.

    Every rank passes the full state; a sharded optimizer loads the part of its own parameters. As with torch's
    `load_state_dict`, tensors of the right dtype and device are not copied. Raises MismatchedCheckpointError if the
    parameter groups do not match; the optimizer is left unchanged.
    """
    check_groups(optimizer, state)
    optimizer.load_state_dict(dict(state))


def check_groups(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise MismatchedCheckpointError unless `state` has the parameter groups of `optimizer`, of the same sizes."""
    saved = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        raise MismatchedCheckpointError(
            "loading the state of an optimizer",
            found=f"it is of groups with {_said(saved)} parameters, those of this {type(optimizer).__name__} have "
            f"{_said(own)}",
            fix="Make the optimizer with the groups that it was saved with, of the same model.",
        )


def _said(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) or "no"
