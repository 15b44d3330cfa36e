# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer as a checkpoint holds it: the same, whether it is divided among the ranks or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer

from ddpilot.errors import MismatchedCheckpointError


@runtime_checkable
class Divided(Protocol):
    """An optimizer of which each rank has only its own parameters' state."""

    def gather_state(self) -> dict[str, Any]:
        """The state of all ranks. Collective."""


def full_state(optimizer: Optimizer) -> dict[str, Any]:
    """What `optimizer.state_dict()` is without sharding, complete on rank 0. Collective where it is sharded.

    The other ranks get the same groups and, of a sharded optimizer, no state. What comes from other ranks is on the
    CPU; a rank's own tensors are those that the next update changes.
    """
    return optimizer.gather_state() if isinstance(optimizer, Divided) else optimizer.state_dict()


def load_full_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `full_state` gave on rank 0, at any number of ranks, sharded or not. Not collective.

    Every rank passes all of it; a sharded optimizer takes the part of its own parameters. As with torch's own, tensors
    of the right dtype and device are taken over and not copied. Raises MismatchedCheckpointError, with nothing changed,
    where groups or numbers of parameters are others.
    """
    check_groups(optimizer, state)
    optimizer.load_state_dict(dict(state))


def check_groups(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise MismatchedCheckpointError unless `state` has the parameter groups of `optimizer`, in their sizes."""
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
