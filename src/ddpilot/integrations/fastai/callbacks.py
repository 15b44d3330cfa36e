# SPDX-License-Identifier: Apache-2.0
"""Callbacks that synchronize a `Learner` with those of the other ranks while it fits or evaluates."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.torch_core import find_bs, to_cpu, to_device
from torch.nn.parallel import DistributedDataParallel

from ddpilot.errors import GroupError
from ddpilot.group.ddp_models import fingerprint
from ddpilot.group.device import broadcast_tensors, device_ids
from ddpilot.group.process_group import Group
from ddpilot.integrations.fastai.loaders import Share, share
from ddpilot.integrations.fastai.metrics import reduce_metrics


class ShareData(Callback):  # type: ignore[misc]  # fastai is untyped
    """Gives each rank its pieces of the batches, and reduces metrics over all ranks."""

    order = -9  # right after TrainEvalCallback, before callbacks that use the loader, the metrics or the weights

    def __init__(self, group: Group) -> None:
        self._ranks = group

    def before_fit(self) -> None:
        """Check that the ranks start from the same data, weights and optimizer. Collective."""
        sync_learner(self.learn, self._ranks)

    def before_train(self) -> None:
        """Replace the learner's loader by this rank's share of it. Also used before validation."""
        self.learn.dl = share(self.learn.dl, self._ranks)

    before_validate = before_train

    def before_step(self) -> None:
        """Let gradient accumulation count the samples of all ranks; it adds this rank's samples itself."""
        for accumulation in self.learn._grab_cbs(GradientAccumulation):
            accumulation.count += self.learn.dl.whole_size - find_bs(self.learn.yb)

    def after_train(self) -> None:
        """Reduce metrics of the training set, if there are any. Collective."""
        self._reduce("_train_mets")

    def after_validate(self) -> None:
        """Reduce metrics of the validation set. Collective."""
        self._reduce("_valid_mets")

    def _reduce(self, which: str) -> None:
        # Without a recorder there are no metrics: predictions are fetched in the middle of a fit.
        recorder = self.learn.cbs and getattr(self.learn, "recorder", None)
        if recorder and isinstance(self.learn.dl, Share):
            reduce_metrics(getattr(recorder, which), self._ranks)


class TrainTogether(Callback):  # type: ignore[misc]  # fastai is untyped
    """Averages gradients over the samples of all ranks, with DistributedDataParallel in the forward pass of training.

    `learn.model` is the user's own model except during the forward pass, so nothing needs to be unwrapped.
    """

    order = 1000  # after callbacks that change the batch, the prediction or the loss
    run_valid = False

    def __init__(self, group: Group) -> None:
        self._ranks = group
        self._module: torch.nn.Module | None = None
        self._ddp: DistributedDataParallel | None = None

    def before_fit(self) -> None:
        """Clear gradients and drop the DDP model, so that the first batch shows which parameters are used."""
        self._module, self._ddp = self.learn.model, None
        self.learn.model.zero_grad(set_to_none=True)

    def before_batch(self) -> None:
        """Use the DDP model for the forward pass, once it has been created."""
        if self._ddp is not None:
            self.learn.model = self._ddp

    def after_pred(self) -> None:
        """Restore the user's model after the forward pass."""
        self.learn.model = self._module

    def after_loss(self) -> None:
        """Weight this rank's loss by its samples, and set the loss to that of the whole batch on all ranks. Collective.

        All decisions of callbacks that depend on the loss are then the same on all ranks.
        """
        if not isinstance(self.learn.dl, Share):
            return
        own = self.learn.dl.own_size
        loss = self.learn.loss.detach().float().mean()  # `loss_grad` may include regularization terms
        totals = torch.stack([loss * own, torch.full_like(loss, own)])
        self._ranks.all_reduce(totals)
        self.learn.loss = totals[0] / totals[1]
        self.learn.loss_grad = self.learn.loss_grad * self._weight(own, totals[1])

    def _weight(self, own: int, whole: torch.Tensor) -> torch.Tensor | float:
        world_size = self._ranks.world_size  # DDP divides the sum of the gradients by it
        if getattr(self.learn.loss_func, "reduction", "mean") == "sum":
            self.learn.loss = self.learn.loss * world_size
            return float(world_size) if own else 0.0
        if len(self.learn._grab_cbs(GradientAccumulation)):  # it has already multiplied by this rank's samples
            return float(world_size) if own else 0.0
        return own * world_size / whole

    def after_backward(self) -> None:
        """Average the gradients of the first batch, then create the DDP model that averages all later ones. Collective.

        `find_unused_parameters` is set if a parameter got no gradient on some rank.
        """
        if self._ddp is None and self._module is not None:
            trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            has_unused = average_gradients(trained, self._ranks)
            self._ddp = DistributedDataParallel(
                self._module,
                device_ids=device_ids(self._module, self._ranks.device),
                find_unused_parameters=has_unused,
            )

    def after_train(self) -> None:
        """Broadcast rank 0's buffers for evaluation, as batch norm statistics differ between ranks. Collective."""
        broadcast_tensors(self.learn.model.buffers(), self._ranks)

    def release(self) -> None:
        """Drop the DDP model and restore `learn.model`. Also called if the fit failed."""
        if self._module is not None:
            self.learn.model = self._module
        self._module = self._ddp = None


def average_gradients(parameters: list[torch.nn.Parameter], group: Group) -> bool:
    """Average the gradients of `parameters` over ranks, in place. Collective.

    Returns True if a parameter has no gradient on at least one rank. Such a gradient counts as zero, and stays None if
    no rank has one.
    """
    device = parameters[0].device
    has = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=device)
    group.all_reduce(has)
    for parameter, count in zip(parameters, has.tolist(), strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad.contiguous()
        parameter.grad = group.all_reduce(dense, "avg")
    return bool((has < group.world_size).any())


def is_shared(learn: Any) -> bool:
    """True if the learner already runs on all ranks."""
    return any(isinstance(callback, ShareData) for callback in learn.cbs)


def sync_learner(learn: Any, group: Group) -> None:
    """Check that data and model are equal on all ranks, and send rank 0's weights and optimizer. Collective.

    Weights and optimizer are only sent if they differ: new models, or a fit that failed after some ranks had stepped.
    Raises GroupError if data or the model's shapes differ; otherwise one rank would train on another's validation set.
    """
    facts = {f"data loader {i}": _outline_data(loader) for i, loader in enumerate(learn.dls)}
    facts["model"] = _outline_model(learn.model)
    by_rank: list[dict[str, str]] = group.all_gather_object(facts)
    for name in facts:
        _check_equal(name, [outlines.get(name, "none") for outlines in by_rank], group)
    if len(set(group.all_gather_object((_digest(learn), learn.opt is not None)))) > 1:
        values = learn.model.state_dict().values()
        broadcast_tensors((one for one in values if isinstance(one, torch.Tensor)), group)
        _share_optimizer(learn, group)


def _share_optimizer(learn: Any, group: Group) -> None:
    state = group.broadcast_object(None if learn.opt is None else to_cpu(learn.opt.state_dict()))
    if state is None:
        learn.opt = None
    elif learn.opt is not None or group.rank:
        if learn.opt is None:
            learn.create_opt()
        learn.opt.load_state_dict(to_device(state, group.device))


def _check_equal(name: str, outlines: list[str], group: Group) -> None:
    if len(set(outlines)) > 1:
        ranks = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(outlines))
        raise GroupError(
            "training a Learner on all ranks",
            found=f"its {name} differs between the ranks ({ranks})",
            fix="Run the cells that create it on all ranks, and seed random draws of its items",
            rank=group.rank,
        )


def _outline_data(loader: Any) -> str:
    dataset: Any = getattr(loader, "dataset", None)
    items: Any = getattr(dataset, "items", None)
    count = len(dataset) if hasattr(dataset, "__len__") else "any number of"
    if hasattr(items, "index") and hasattr(items, "iloc"):  # a table: its rows are identified by their labels
        items = list(items.index)
    try:
        names = [item for item in items or () if isinstance(item, (str, int, float)) or hasattr(item, "__fspath__")]
    except (TypeError, ValueError):  # not a collection, or one of arrays, which have no truth value
        names = []
    digest = hashlib.blake2b("\n".join(map(str, names)).encode(), digest_size=4).hexdigest()
    return f"{count} samples" + (f" ({digest})" if names else "")


def _outline_model(model: torch.nn.Module) -> str:
    shapes = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items() if hasattr(tensor, "shape")]
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=4).hexdigest()
    return f"{type(model).__name__} with {len(shapes)} tensors ({digest})"


def _digest(learn: Any) -> str:
    parts: list[Any] = [sorted(fingerprint(learn.model).items())]
    parts.append([(name, _sum(buffer)) for name, buffer in learn.model.named_buffers()])
    if learn.opt is not None:
        parts.append(_sums(learn.opt.state_dict()))
    return hashlib.blake2b(repr(parts).encode()).hexdigest()


def _sums(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _sum(value)
    if isinstance(value, dict):
        return [(str(key), _sums(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)) or hasattr(value, "items"):
        return [_sums(part) for part in value]
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def _sum(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().sum())
