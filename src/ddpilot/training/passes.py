# SPDX-License-Identifier: Apache-2.0
"""Detects backward passes that lose gradients: cleared during accumulation, or run twice through one forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ddpilot.errors import LoopError
from ddpilot.training.losses import walk


class GroupWatch:
    """Detects gradients of an accumulation group that were cleared before its update."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._added: list[tuple[nn.Parameter, torch.Tensor, int]] = []

    def begin(self) -> None:
        """Forget all gradients: an accumulation group begins, or its update was made."""
        self._added.clear()

    def check(self, batch: Any) -> None:
        """Raise LoopError if gradients of the group of `batch` are gone. Waits for a GPU only if one was modified."""
        for parameter, gradient, version in self._added:
            now = parameter.grad
            if now is None or (now is gradient and now._version != version and not bool(now.any())):
                raise LoopError(
                    "running backward",
                    found=f"the gradients of the earlier batches of this accumulation group (of {batch.group_size}) "
                    "were cleared, by zero_grad() or by setting them to None, so the update would leave those out",
                    fix="Remove optimizer.zero_grad(): loop.step(optimizer) clears the gradients after the update.",
                    rank=self._rank,
                )

    def note(self, models: Iterable[nn.Module]) -> None:
        """Record one gradient of each of `models`, after a backward pass."""
        self._added.clear()
        for model in models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    self._added.append((parameter, parameter.grad, parameter.grad._version))
                    break


class GraphWatch:
    """Detects two backward passes through one forward pass: DDP all-reduces each gradient once per forward pass."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._nodes: set[Any] = set()

    @property
    def has_graph(self) -> bool:
        """True if an earlier backward pass of the batch has retained its graph."""
        return bool(self._nodes)

    def begin(self) -> None:
        """Forget the graphs of the previous batch."""
        self._nodes.clear()

    def look(self, losses: Iterable[torch.Tensor], trained: Iterable[nn.Module], *, retains: bool) -> None:
        """Raise LoopError if an earlier backward pass ran through a part of the graph of `losses`.

        Call it before the backward pass of `losses`. Only parts that lead to trainable parameters of the models in
        `trained` count.
        """
        nodes = set(walk(losses))
        if shared := nodes & self._nodes:
            known = {id(one) for model in trained for one in model.parameters() if one.requires_grad}
            inner = {following for node in shared for following, _ in node.next_functions}
            if any(id(getattr(node, "variable", None)) in known for node in inner):
                raise LoopError(
                    "running backward",
                    found="an earlier backward pass of this batch (with retain_graph=True) went through the same "
                    "forward pass, whose gradients cross between ranks once",
                    fix='Add the losses and call backward once; or loop.backward({"a": loss_a, "b": (loss_b, count)}) '
                    "if they are means over different things.",
                    rank=self._rank,
                )
        if retains:
            self._nodes |= nodes
