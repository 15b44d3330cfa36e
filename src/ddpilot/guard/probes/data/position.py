# SPDX-License-Identifier: Apache-2.0
"""Where training is on this rank: which pass over which loader, which batch; shared by the parts of the data probe."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ddpilot.guard.probes.data.sketch import Sketch


@dataclass(eq=False)
class Pass:
    """One iteration over a loader."""

    loader: int
    """Number of the loader, made of the line that began to read it, and how many were read there before."""
    number: int
    """Counts the loader's passes from 1."""
    length: int | None
    num_workers: int
    site: dict[str, Any]
    sketch: Sketch | None
    """None where nothing is to be compared."""
    num_batches: int = 0
    num_samples: int = 0
    sizes: list[int] = field(default_factory=list)
    """Rows of its batches, a run of equal ones once; the first three runs."""
    num_evaluating: int = 0
    """Batches that were fetched for an evaluation."""
    trained: set[int] = field(default_factory=set)
    """Numbers of the models that it trained."""
    asked: deque[Any] = field(default_factory=deque)
    """Sample numbers of batches that were asked for and not given yet."""
    order: list[int] | None = field(default_factory=list)
    """The first sample numbers that were asked for, until they are noted."""

    @property
    def key(self) -> dict[str, int]:
        """What the entries about it have in common."""
        return {"loader": self.loader, "pass": self.number}


@dataclass
class Given:
    """A batch that a loader gave."""

    of: Pass
    batch: int
    """Counts from 1."""
    indices: tuple[int, ...]
    """The first sample numbers; empty where there are none."""
    pointers: frozenset[int]
    """Addresses of its tensors."""


@dataclass(eq=False)
class Position:
    """Where training is."""

    models: WeakKeyDictionary[nn.Module, int] = field(default_factory=WeakKeyDictionary)
    """DDP models of this process by number, in the order in which they were made."""
    fetched: dict[int, Pass] = field(default_factory=dict)
    """Passes that gave a batch to train on since the last forward, by loader."""
    given: deque[Given] = field(default_factory=lambda: deque(maxlen=4))
    """The newest batches."""
    used: Given | None = None
    """The batch of the last forward in training."""
    evaluated: Pass | None = None
    """The last pass, where it was an evaluation that has ended and no training came since."""

    def is_evaluating(self) -> bool:
        """Whether every DDP model of this process is in eval mode; False where there is none."""
        models = list(self.models)
        # As `model.module`, at a fraction of what nn.Module's attributes cost.
        return bool(models) and not any(one.training and one._modules["module"].training for one in models)  # type: ignore[union-attr]

    def find_given(self, pointers: frozenset[int]) -> Given | None:
        """The newest batch that has one of these tensors, else the newest one."""
        for given in reversed(self.given):
            if given.pointers & pointers:
                return given
        return self.given[-1] if self.given else None
