# SPDX-License-Identifier: Apache-2.0
"""`TrainerCore`: the state of a `Trainer`, its default training step, and the part of it that checkpoints hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ddpilot.checkpoint.weights import class_name
from ddpilot.errors import LoopError
from ddpilot.findings.finding import Finding
from ddpilot.launcher import Launcher
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.checks import MAKING, check_callbacks, check_choice, check_metrics, check_model
from ddpilot.trainer.history import History
from ddpilot.trainer.losses import EpochLosses, LossSums, Summands, check_attached, check_weighted, with_count
from ddpilot.trainer.optimizers import make_ema, make_optimizers, make_schedulers, own_attributes, restore_attributes
from ddpilot.trainer.run import Forward, Run
from ddpilot.training.batch_groups import Loader
from ddpilot.training.evaluation.evaluate import forward_batch
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import DDPOptions, run_in_forward
from ddpilot.training.models.explain import Explanation
from ddpilot.training.models.optimizers import requires_closure
from ddpilot.training.options import Interval, check_clipping, naming_arguments
from ddpilot.training.step.accumulation import Accumulate, AccumulationSchedule
from ddpilot.training.step.precision import Kind
from ddpilot.training.step.weight_averages import Averaging

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_NUM_CHECKED = 8
"""Number of batches per epoch in which labels are checked; the check waits for the device."""


class FitRecords:
    """What the fits so far leave in a trainer, next to the trained objects."""

    def __init__(self) -> None:
        self.history = History()
        """Rows of all fits so far."""
        self.position = Position()
        """Position over all fits: `epoch`, `num_updates`."""
        self.findings: tuple[Finding, ...] = ()
        """Findings of the fits about the training setup, each reported once."""
        self.explanation: Explanation | None = None
        """DDP options chosen by the last fit, see `explain`."""
        self.batch_size = 64
        """Default number of samples per batch on all ranks in `evaluate` and `predict`: that of the last fit."""
        self.nproc_per_node: int | str | None = None
        """The last `nproc_per_node` passed to a fit, which later fits use too."""


class TrainerCore(FitRecords):
    """The parts and records of a `Trainer`; for the arguments see `Trainer`."""

    @naming_arguments(
        MAKING,
        dict.fromkeys(("epochs", "global_batch_size", "batch_size", "nproc_per_node"), "It belongs to `fit`."),
    )
    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        forward: Forward | None = None,
        scheduler: Any = None,
        scheduler_per: Literal["update", "epoch"] | int | str = "update",
        ema: float | AveragedModel | None = None,
        average: Averaging | None = None,
        clip_norm: float | None = None,
        clip_norm_type: float = 2.0,
        clip_value: float | None = None,
        clip_per: Literal["model", "group"] = "model",
        accumulate: Accumulate = 1,
        precision: Kind = "fp32",
        compile: bool | Mapping[str, Any] = False,  # noqa: A002  (torch's word)
        closure: bool | None = None,
        seed: int = 0,
        launcher: Launcher | None = None,
    ) -> None:
        super().__init__()
        check_model(model)
        self.model = model
        """The model that was passed; it has the trained weights after a fit."""
        self.loss_fn = loss_fn
        self.optimizers = make_optimizers(optimizer, model)
        self.schedulers = make_schedulers(scheduler, self.optimizers)
        self.ema = make_ema(ema, model, average)
        check_metrics(metrics)
        self.metrics = dict(metrics or {})
        self.callbacks = list(callbacks)
        check_callbacks(callbacks)
        self.forward: Forward = forward or forward_batch
        self.scheduler_per = scheduler_per
        given = {"update": 1, "epoch": "1 epoch"}.get(str(scheduler_per), scheduler_per)
        self.scheduler_every = Interval.parse(given, did=MAKING, name="scheduler_per")
        self.clip_norm, self.clip_norm_type = clip_norm, clip_norm_type
        self.clip_value, self.clip_per = clip_value, clip_per
        self.accumulate = accumulate
        self.precision: Kind = precision
        self.compile = compile
        self.closure = any(map(requires_closure, self.optimizers.values())) if closure is None else closure
        """True if the optimizer computes the loss several times per update."""
        self.seed, self.launcher = seed, launcher
        self.has_own_forward = forward is not None  # True if `forward` was passed
        check_trainer(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_of_optimizers": own_attributes(self.optimizers)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        attributes = state.pop("_of_optimizers")
        self.__dict__.update(state)
        restore_attributes(self.optimizers, attributes)

    @property
    def has_own_step(self) -> bool:
        """True if a subclass overrides `train_batch`."""
        return type(self).train_batch is not TrainerCore.train_batch

    @property
    def has_own_validation(self) -> bool:
        """True if a subclass overrides `validate_batch`."""
        return type(self).validate_batch is not TrainerCore.validate_batch

    @property
    def all_metrics(self) -> dict[str, Any]:
        """The metrics, and the loss under the name "loss"."""
        return self.metrics if self.loss_fn is None else {"loss": self.loss_fn, **self.metrics}

    def train_batch(self, run: Run, batch: Any) -> Any:
        """Process one batch: forward, backward, and an update if one is due. Override it for a different training step.

        Returns what to record: a mean loss, (mean loss, count), or a dict of these by name. `run.wrapped` is the model
        to call, `run.optimizers` are the optimizers to step, and `run.loop` has `accumulate`, `backward` and `step`.
        """
        if not self.closure:
            returned = self._evaluate_batch(run, batch)
            for name, optimizer in run.optimizers.items():
                run.loop.step(optimizer, run.schedulers.get(name))
            return returned
        evaluations: list[Any] = []  # the first one is at the weights before the update
        for name, optimizer in run.optimizers.items():  # a single one: see `check_fit`
            run.loop.step(
                optimizer,
                run.schedulers.get(name),
                closure=lambda: evaluations.append(self._evaluate_batch(run, batch)),
                ahead=True,
            )
        return evaluations[0]

    def _evaluate_batch(self, run: Run, batch: Any) -> Any:
        """Compute loss and gradients of a batch, and clip the gradients. Returns what `train_batch` does."""
        loop = run.loop
        if self.loss_fn is None:
            raise LoopError("training a batch", found="no `loss_fn`", fix="Give one, or override `train_batch`.")
        parts = run.wrapped.values() if isinstance(run.wrapped, dict) else [run.wrapped]
        wrapped = nn.ModuleDict(run.wrapped) if isinstance(run.wrapped, dict) else run.wrapped
        with loop.accumulate(*parts):
            output, target = run_in_forward(wrapped, lambda model: self.forward(model, batch))
            loss, count = with_count(self.loss_fn(output, target))
            if not isinstance(loss, Mapping):
                check_attached(loss, loop.rank)
            if count is None and loop.batch is not None and loop.batch.index < _NUM_CHECKED:
                check_weighted(loss, output, batch, loop.rank)
            loop.backward(loss, count)
        if count is not None:
            loop.log({}, per_s={"items": count})
        self._clip(run)
        if isinstance(loss, Mapping):
            return Summands(loss)
        return loss if count is None else (loss, count)

    def _clip(self, run: Run) -> None:
        """Clip the gradients, all together or those of each parameter group."""
        limits: Mapping[str, Any] = {"clip_norm": self.clip_norm, "clip_value": self.clip_value}
        for given in [{"params": run.model.parameters()}] if self.clip_per == "model" else groups_of(run.optimizers):
            of_group = {**limits, **{name: given[name] for name in limits if name in given}}
            if of_group["clip_value"] is not None:
                run.loop.clip_grad_value_(given["params"], of_group["clip_value"])
            if of_group["clip_norm"] is not None:
                run.loop.clip_grad_norm_(given["params"], of_group["clip_norm"], self.clip_norm_type)

    def validate_batch(self, model: nn.Module, batch: Any) -> Any:
        """Compute what is recorded of one batch of a validation. Override it for a different validation step.

        Returns a dict of values by name: each the mean over this rank's samples, (mean, count), or one value per
        sample; a value alone is named "loss". `model`: not wrapped, in eval mode, without gradients; with `ema=` the
        average. Ranks without samples do not call it, so it must not run collectives. It replaces the loss and
        `metrics=`; the one here returns the loss.
        """
        if self.loss_fn is None:
            raise LoopError("validating a batch", found="no `loss_fn`", fix="Give one, or return values without it.")
        return self.loss_fn(*self.forward(model, batch))

    def measure(self, loop: Loop, model: nn.Module, loader: Loader) -> dict[str, Any]:
        """Return the values of a validation over all samples of `loader`. Collective."""
        if self.has_own_validation:
            return loop.evaluate(model, loader, step=self.validate_batch)
        return loop.evaluate(model, loader, self.all_metrics, forward=self.forward)

    def __repr__(self) -> str:
        num = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        name = f"{type(self).__name__}({class_name(self.model)}, {num:,} parameters to train"
        return f"{name}; epoch {self.position.epoch}, {self.position.num_updates} updates)"

    def explain(self) -> Explanation:
        """Explain what the last fit chose for DDP and the optimizers, why, at what cost, and what would be better.

        The text of `Loop.explain` at the end of that fit; a notebook shows a table. Not collective. Raises LoopError
        before the first fit.
        """
        if self.explanation is None:
            found = "no fit has ended yet, and the choices are made and measured in a fit"
            raise LoopError("explaining what was chosen", found=found, fix="Call fit() first; or choose with `ddp=`.")
        return self.explanation

    def plot(self) -> Figure:
        """Plot losses and metrics over the epochs as a matplotlib figure, which a notebook cell can show.

        With several validation sets each metric has a panel, and each set its colour.

        Raises LoopError if nothing has been recorded yet.
        """
        from ddpilot.trainer.history import plot_history

        return plot_history(self.history, list(self.metrics))


@dataclass
class Position:
    """Position at which the next fit starts."""

    epoch: int = 0
    next_batch: int = 0
    """0, unless the last fit was stopped in the middle of `epoch`."""
    num_updates: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    """Description of the data to which `next_batch` applies."""


class FitState:
    """The history and the callbacks' states, saved and restored together with a checkpoint."""

    def __init__(self, history: History, callbacks: Sequence[Callback]) -> None:
        self._history = history
        self._callbacks = callbacks
        self._losses: EpochLosses | None = None
        self._loop: Loop | None = None
        self.interval = LossSums()
        """The losses since the last interval of `validate_every` updates ended, up to the last `take`."""
        self._resumed: dict[str, Any] | None = None

    def begin_epoch(self, loop: Loop) -> EpochLosses:
        """Return the losses of an epoch that starts now, or that resumes from a checkpoint in its middle."""
        before, self._resumed = self._resumed, None
        self._losses = EpochLosses(loop, before if loop.next_batch else None)
        self._loop = loop
        return self._losses

    def take(self, *, ends_interval: bool = False) -> None:
        """Add the losses since the last call to the sums of epoch and interval, and to the history. Collective."""
        assert self._losses is not None  # set by begin_epoch()
        assert self._loop is not None
        part = self._losses.take(self._loop.num_updates, ends_interval=ends_interval)
        self._history.updates.extend(part.rows)
        self.interval.add(part)

    def end_interval(self) -> LossSums:
        """Return the losses of the interval, and begin the next one."""
        sums, self.interval = self.interval, LossSums()
        return sums

    def end_epoch(self) -> LossSums:
        """Return the losses of the epoch, which go into the history."""
        assert self._losses is not None  # set by begin_epoch()
        sums, self._losses = self._losses.sums, None
        return sums

    def restart_clock(self) -> None:
        """Leave a validation within the epoch out of its duration."""
        if self._losses is not None:
            self._losses.restart_clock()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with callbacks in order, by class name. Collective in the middle of an epoch."""
        states = [(type(callback).__qualname__, callback.state_dict()) for callback in self._callbacks]
        running = None if self._losses is None else self._losses.state_dict()
        interval = self.interval.state_dict()
        return {"history": self._history.state_dict(), "callbacks": states, "running": running, "interval": interval}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state. A callback without a saved state keeps its own; one without a callback is ignored."""
        self._resumed = state["running"]
        self.interval = LossSums(state.get("interval"))
        self._history.load_state_dict(state["history"])
        remaining = list(state["callbacks"])
        for callback in self._callbacks:
            name = type(callback).__qualname__
            index = next((index for index, (kind, _) in enumerate(remaining) if kind == name), None)
            if index is not None:
                callback.load_state_dict(remaining.pop(index)[1])


def groups_of(optimizers: Mapping[str, Optimizer]) -> list[dict[str, Any]]:
    """Return the parameter groups of all optimizers."""
    return [group for optimizer in optimizers.values() for group in optimizer.param_groups]


def _check_clipping(trainer: TrainerCore) -> None:
    """Raise LoopError for limits that are not above 0, that would not be used, or two for the same gradients."""
    names = ("clip_norm", "clip_value")
    check_choice(MAKING, "clip_per", trainer.clip_per, ("model", "group"))
    check_clipping(MAKING, clip_norm_type=trainer.clip_norm_type)
    own = {name: getattr(trainer, name) for name in names}
    groups = groups_of(trainer.optimizers)
    for number, group in enumerate(groups):
        given = {name: group[name] for name in names if name in group}
        if given and trainer.clip_per == "model":
            found = f"parameter group {number} has {', '.join(map(repr, given))}, which clipping per model does not use"
            raise LoopError(MAKING, found=found, fix='Pass `clip_per="group"`.')
    for limits in (own, *({**own, **{name: one[name] for name in names if name in one}} for one in groups)):
        used = {name: limit for name, limit in limits.items() if limit is not None}
        check_clipping(MAKING, **used)
        if len(used) == 2:
            found = f"`clip_norm` {used['clip_norm']} and `clip_value` {used['clip_value']} for the same gradients"
            raise LoopError(MAKING, found=found, fix="Give one of the two; None in a parameter group does not clip it.")


def check_trainer(trainer: TrainerCore) -> None:
    """Raise LoopError for invalid arguments, and for those that would train or measure something else than intended."""
    loss_fn: object = trainer.loss_fn
    if loss_fn is not None and not callable(loss_fn):
        found = f"`loss_fn` is {loss_fn!r}"
        raise LoopError(MAKING, found=found, fix="Give a function of (output, target): torch.nn.functional.mse_loss.")
    if trainer.loss_fn is not None and "loss" in trainer.metrics:
        found = "a metric called 'loss', which is the name of `loss_fn` in the history and in evaluations"
        raise LoopError(MAKING, found=found, fix="Give the metric a different name.")
    if trainer.has_own_validation and trainer.metrics:
        found = f"`metrics` ({', '.join(map(repr, trainer.metrics))}), which an overridden `validate_batch` replaces"
        raise LoopError(MAKING, found=found, fix="Return their values from `validate_batch`, or do not override it.")
    check_choice(MAKING, "precision", trainer.precision, get_args(Kind))
    closure: object = trainer.closure
    if not isinstance(closure, bool):
        found = f"`closure` is {closure!r}"
        raise LoopError(MAKING, found=found, fix="Give True, False, or None to find out from the optimizer's `step`.")
    _check_clipping(trainer)
    DDPOptions(compile=trainer.compile)
    AccumulationSchedule.parse(trainer.accumulate, MAKING)
