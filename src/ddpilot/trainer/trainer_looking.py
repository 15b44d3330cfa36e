# SPDX-License-Identifier: Apache-2.0
"""The methods of a `Trainer` that use its model without training it: evaluate, predict, call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn

from ddpilot.trainer.batches import Forward
from ddpilot.trainer.checks import check_choice, check_forward, check_loader_options, check_whole
from ddpilot.trainer.core import TrainerState
from ddpilot.trainer.looking import call_here, evaluate_here, predict_here
from ddpilot.trainer.ranks import is_on_ranks, run_on_ranks
from ddpilot.training.evaluation.forwarding import predict_batch


class LookingTrainer(TrainerState):
    """Evaluate, predict and call the model, in this process or on ranks."""

    def evaluate(
        self,
        dataset: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        forward: Forward | None = None,
        nproc_per_node: int | str = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the loss and each metric over all samples of `dataset`, each counted once.

        Runs in this process, where it moves the model to the device; with `nproc_per_node` on ranks that are started
        for it; on an existing rank in place, which is collective. `metrics`, `forward`: replace the trainer's.
        `options`: those of `Loop.loader`, such as `global_batch_size` (default: that of the last fit, or 64) and
        `num_workers`.
        """
        wanted = self.all_metrics if metrics is None else dict(metrics)
        check_loader_options("evaluating", "`evaluate`", options)
        check_forward("evaluating", self.model, forward is not None or self.has_own_forward)
        check_whole("evaluating", "`dataset`", dataset)
        if is_on_ranks() or nproc_per_node == 0:
            return evaluate_here(self, dataset, wanted, forward, options)
        said = run_on_ranks(self, nproc_per_node, "evaluate", evaluate_here, dataset, wanted, forward, options)
        found: dict[str, Any] = said[0]
        return found

    def predict(
        self,
        dataset: Any,
        *,
        to: str | os.PathLike[str] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        nproc_per_node: int | str = 0,
        **options: Any,
    ) -> Any:
        """Return the model's outputs for all samples of `dataset`, in its order, on the CPU. See `Loop.predict`.

        Runs where `evaluate` would, with the same `options`. `to`: a folder, which must not exist, to write the outputs
        to batch by batch. `forward(model, batch)` returns the part of the output to keep, with one row per sample:
        `lambda model, batch: model(**batch)["logits"]`. On an existing rank, only rank 0 gets the outputs. Returns None
        if there are no samples.
        """
        check_loader_options("predicting", "`predict`", options)
        check_forward("predicting", self.model, forward is not None or self.has_own_forward)
        check_whole("predicting", "`dataset`", dataset)
        if is_on_ranks() or nproc_per_node == 0:
            return predict_here(self, dataset, to, forward, options)
        return run_on_ranks(self, nproc_per_node, "predict", predict_here, dataset, to, forward, options)[0]

    def output_of(self, model: nn.Module, batch: Any) -> Any:
        """Return the prediction for a batch; it needs a target in the batch only if `forward` does."""
        return self.forward(model, batch)[0] if self.has_own_forward else predict_batch(model, batch)

    def call(
        self,
        method: str,
        *args: Any,
        ranks: Literal["zero", "all"] = "zero",
        nproc_per_node: int | str = 0,
        **kwargs: Any,
    ) -> Any:
        """Call the model's `method`, such as "sample", unwrapped, in eval mode, without gradients.

        Runs in this process; with `nproc_per_node` on ranks that are started for it, and returns rank 0's result, or
        with `ranks="all"` a list of every rank's; on an existing rank in place, where ranks not in `ranks` return None.
        Not collective. Tensors in the result are on the CPU.
        """
        check_choice(f"calling `{method}` of the model", "ranks", ranks, ("zero", "all"))
        if is_on_ranks() or nproc_per_node == 0:
            return call_here(self, method, args, kwargs, ranks)
        said = run_on_ranks(self, nproc_per_node, "call", call_here, method, args, kwargs, ranks)
        return list(said) if ranks == "all" else said[0]
