# SPDX-License-Identifier: Apache-2.0
"""Wraps models in DistributedDataParallel and unwraps them; its options; methods as forward passes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ddpilot.errors import LoopError
from ddpilot.group.device import broadcast_tensors, device_ids, is_divided, move
from ddpilot.group.process_group import Group
from ddpilot.group.protocol import GroupLike
from ddpilot.training.models.comm_hooks import Comm, check_comm, check_compressible, describe_comm, register, runs_alone
from ddpilot.training.models.sharding import ParameterSharding, is_sharded
from ddpilot.training.options import keywords_of, suggest


def wrap(model: nn.Module, group: GroupLike, options: DDPOptions | None = None) -> tuple[nn.Module, tuple[Choice, ...]]:
    """Move `model` to the group's device and wrap it in DDP; return it with the options chosen.

    Not wrapped with one rank, unless a hook changes its gradients, or if no parameter requires a gradient. A model on
    several devices stays there. Collective with several ranks. Raises LoopError for a model that is already in DDP, and
    for options that it does not support.
    """
    options = options or DDPOptions()
    if isinstance(model, DistributedDataParallel):
        raise LoopError(
            "preparing a model",
            found="it is already a DistributedDataParallel",
            fix="Pass the model itself: prepare() wraps it.",
        )
    if is_sharded(model):
        return model, ()
    if options.comm is not None:
        check_compressible(model, options.comm)
    if options.sync_batch_norm:
        model = _with_synced_batch_norm(model, group)
    if not is_divided(model, group.device):
        move(model, group.device)
    trains = any(parameter.requires_grad for parameter in model.parameters())
    is_alone = group.world_size == 1 and not runs_alone(options.comm)
    if is_alone or not trains or not isinstance(group, Group):
        return model, ()
    arguments, choices = resolve(options, model, group, os.environ)
    wrapped = PreparedDDP(model, **arguments)
    if options.comm is not None:
        register(wrapped, options.comm)
    if not HAS_FORWARD_SYNC:  # without it, older versions of torch do not sync buffers at construction
        broadcast_tensors(model.buffers(), group)
    return wrapped, tuple(choices)


def _with_synced_batch_norm(model: nn.Module, group: GroupLike) -> nn.Module:
    if group.device.type == "cpu":
        raise LoopError(
            "preparing a model with `sync_batch_norm=True`",
            found="torch's SyncBatchNorm runs only on GPUs, and this rank's device is the CPU",
            fix="Use GroupNorm or LayerNorm, which need no batch statistics, or omit the option on the CPU.",
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return,no-untyped-call]


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP model that `model` is or that `torch.compile` wraps; None if there is none."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, `torch.compile(ddp)` or `AveragedModel(ddp)`; else `model` itself. Not collective.

    The returned model has the same weights and runs no collectives. Use it for a forward pass whose gradients must not
    be all-reduced, for methods other than `forward`, and to change the model before it is prepared again.
    """
    if isinstance(model, DistributedDataParallel):
        return unwrap(model.module)
    inner = getattr(model, "_orig_mod", None) or (model.module if isinstance(model, AveragedModel) else None)
    return unwrap(inner) if isinstance(inner, DistributedDataParallel) else model


def reduces_in_fp16(model: nn.Module) -> bool:
    """True if `model` was prepared with `comm="fp16"`, in which a gradient above 65,504 becomes infinite."""
    ddp = find_ddp(model)
    return ddp is not None and any(hook is default_hooks.fp16_compress_hook for hook, _ in ddp._comm_hooks)


class PreparedDDP(DistributedDataParallel):
    """DDP with the public methods and attributes of the wrapped model, so that programs also run on one rank unchanged.

    A method runs as a forward pass of DDP: the gradients of its result are all-reduced.
    """

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_modules", {}).get("module")
        if name == "module" and model is not None:  # read in every forward pass
            return model
        try:
            return super().__getattr__(name)
        except AttributeError:
            if model is None or name.startswith("_"):
                raise
        value = getattr(model, name)
        if not inspect.ismethod(value):
            return value
        return lambda *args, **kwargs: run_in_forward(self, lambda inner: getattr(inner, name)(*args, **kwargs))


class _Once(nn.Module):
    """Replaces the model inside DDP for one forward pass, so that the hooks of the model run as without DDP.

    It holds the model, for hooks of DDP that read parameters.
    """

    def __init__(self, function: Callable[[], Any], model: nn.Module) -> None:
        super().__init__()
        self._function = function
        self.model = model

    def forward(self, _: None) -> Any:
        return self._function()


def run_in_forward(wrapped: Any, function: Callable[[Any], Any]) -> Any:
    """Return `function(model)`, run as a forward pass of the DDP model `wrapped`; `model` is the wrapped module.

    If `wrapped` is not a DDP model, return `function(wrapped)`. With `find_unused_parameters`, DDP searches the result
    of `function`: tensors, and tuples and dicts of them.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return function(wrapped)
    model: nn.Module = wrapped.module

    def call() -> Any:
        wrapped.module = model
        return function(model)

    wrapped.module = _Once(call, model)
    try:
        return wrapped(None)  # with `device_ids`, torch fails for a call without arguments
    finally:
        wrapped.module = model


_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
_TAKEN = ("self", "module", "process_group", "device_mesh", "broadcast_buffers")
HAS_FORWARD_SYNC = "forward_sync_buffers" in _KNOWN
"""Older versions of torch call it `broadcast_buffers`; with False they do not sync buffers at construction either."""

FIND_UNUSED_VARIABLE = "DDP_FIND_UNUSED_PARAMETERS"
COMPILE_OPTIONS = ("mode", "fullgraph", "dynamic", "backend", "options")
"""Arguments of torch.compile that `compile` takes."""
_SWITCHES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


class Choice(NamedTuple):
    """An option's name in `prepare`, its value, and the reason for the value."""

    option: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True)
class DDPOptions:
    """Options of `Loop.prepare` for DistributedDataParallel, and of `Trainer.fit` as `ddp=`.

    Raises LoopError for arguments that DDP does not have, and for an unknown `comm` or `shard`.
    """

    find_unused_parameters: bool | None = None
    """None: the value of the variable DDP_FIND_UNUSED_PARAMETERS (1 or 0), False if it is not set."""
    static_graph: bool = False
    """True if every update of the training uses the same parameters in the same way."""
    bucket_cap_mb: float | None = None
    """Bucket size in MiB; None: DDP's 25, after a first bucket of 1."""
    gradient_as_bucket_view: bool = True
    """True if gradients are views into the buckets."""
    forward_sync_buffers: bool = False
    """True if rank 0 broadcasts its buffers in the first forward pass after each update, which is DDP's default."""
    comm: Comm | None = None
    """How gradients are all-reduced. "bf16" or "fp16": in this dtype; None: in their own. "powersgd", or a `PowerSGD`:
    as thin matrices. Or a communication hook of DDP, or (state, hook)."""
    sync_every: int | None = None
    """Local SGD: number of updates between two averages of the weights over ranks; gradients are not all-reduced. None:
    off."""
    sync_start: int = 0
    """With `sync_every`: number of updates with all-reduced gradients before local SGD begins."""
    shard: Literal["optimizer", "parameters"] | ParameterSharding | None = None
    """"optimizer": each rank keeps the optimizer state of a share of the parameters (ZeroRedundancyOptimizer).
    "parameters", or a `ParameterSharding`: each rank keeps a shard of parameters, gradients and optimizer state (FSDP2,
    without DDP)."""
    sync_batch_norm: bool = False
    """True if BatchNorm computes its statistics over all ranks; on GPUs only."""
    compile: bool | Mapping[str, Any] = False
    """True, or arguments of torch.compile ("mode", "fullgraph", "dynamic", "backend", "options"): models are compiled
    in place, before they are wrapped in DDP or sharded."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments, passed to DistributedDataParallel unchanged."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.more if name not in _KNOWN or name in _TAKEN]
        if unknown:
            own = [one.name for one in fields(self) if one.name != "more"]
            others = [*own, *(name for name in _KNOWN if name not in (*_TAKEN, *own))]
            hint = "`broadcast_buffers` is `forward_sync_buffers` here."
            raise LoopError(
                "preparing a model",
                found=f"no option {', '.join(f'`{name}`' for name in unknown)}",
                fix=hint if "broadcast_buffers" in unknown else suggest(unknown[0], others),
            )
        check_comm(self.comm)
        self._check_local()
        self._check_compile()
        if self.sharding is not None:
            if unfit := [name for name in keywords_of(self) if name not in ("shard", "compile")]:
                found = f"`{unfit[0]}`, an option of DDP, with `shard={self.shard!r}`, which does not use DDP"
                raise LoopError("preparing a model", found=found, fix="Leave one of the two out.")
        elif self.shard not in (None, "optimizer"):
            fix = "Use 'optimizer' (state of the optimizers), 'parameters', a ParameterSharding, or None."
            raise LoopError("preparing an optimizer", found=f"`shard` is {self.shard!r}", fix=fix)

    def _check_local(self) -> None:
        given: tuple[tuple[str, Any, int], ...] = (
            ("sync_every", self.sync_every, 1),
            ("sync_start", self.sync_start, 0),
        )
        for name, value, least in given:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                fix = f"Pass a number of updates, {least} or more{' or None' if least else ''}."
                raise LoopError("preparing a model", found=f"`{name}` is {value!r}", fix=fix)
        for name in ("comm", "shard"):
            if self.sync_every is not None and getattr(self, name) is not None:
                found = f"`{name}` with `sync_every={self.sync_every}`, whose ranks update all weights on their own"
                raise LoopError("preparing a model", found=found, fix="Leave one of the two out.")

    def _check_compile(self) -> None:
        given: Any = self.compile
        did = "preparing a model"
        if not isinstance(given, bool | Mapping):
            fix = 'Pass True, or arguments of torch.compile: {"mode": "max-autotune"}.'
            raise LoopError(did, found=f"`compile` is {given!r}", fix=fix)
        names = [] if isinstance(given, bool) else [name for name in given if name not in COMPILE_OPTIONS]
        if names:
            raise LoopError(did, found=f"`compile` with {names[0]!r}", fix=suggest(names[0], COMPILE_OPTIONS))
        if given is not False and self.bucket_cap_mb is not None and self.bucket_cap_mb < 1:
            found = f"`bucket_cap_mb={self.bucket_cap_mb}` with `compile`, whose first part has 1 MiB of parameters"
            raise LoopError(did, found=found, fix="Give 1 or more, or leave one of the two out.")

    @property
    def sharding(self) -> ParameterSharding | None:
        """How parameters are sharded; None: they are not."""
        if isinstance(self.shard, ParameterSharding):
            return self.shard
        return ParameterSharding() if self.shard == "parameters" else None


def resolve(
    options: DDPOptions, model: nn.Module, group: Group, environ: Mapping[str, str]
) -> tuple[dict[str, Any], list[Choice]]:
    """Return the arguments of DistributedDataParallel and the reason for each of them.

    Raises LoopError for an invalid value of the variable DDP_FIND_UNUSED_PARAMETERS.
    """
    finds_unused, origin = find_unused(options, environ)
    divided = is_divided(model, group.device)
    values: dict[str, Any] = {
        "forward_sync_buffers": options.forward_sync_buffers,
        "find_unused_parameters": finds_unused,
        "static_graph": options.static_graph,
        "gradient_as_bucket_view": options.gradient_as_bucket_view,
        "bucket_cap_mb": options.bucket_cap_mb,
    }
    arguments = {"process_group": group.process_group, "device_ids": device_ids(model, group.device), **values}
    if not HAS_FORWARD_SYNC:
        arguments["broadcast_buffers"] = arguments.pop("forward_sync_buffers")
    arguments |= options.more
    comm, why_comm = describe_comm(options.comm)
    values |= {"bucket_cap_mb": options.bucket_cap_mb or 25, "comm": comm}
    reasons = {name: _WHY[name][value] for name, value in values.items() if name in _WHY}
    reasons["comm"] = why_comm
    reasons["find_unused_parameters"] = origin + reasons["find_unused_parameters"]
    is_default = options.bucket_cap_mb is None
    reasons["bucket_cap_mb"] = "DDP's default, after a first bucket of 1" if is_default else "requested"
    why = "the model is on several devices and stays there" if divided else f"this rank's device is {group.device}"
    choices = [Choice("device_ids", str(arguments["device_ids"]), why)]
    choices += [Choice(name, str(value), reasons[name]) for name, value in values.items()]
    if options.sync_every is not None:
        why = f"the weights are averaged then; gradients are not all-reduced after update {options.sync_start}"
        choices.append(Choice("sync_every", f"{options.sync_every}", why))
    choices += [Choice("sync_batch_norm", "True", "requested")] if options.sync_batch_norm else []
    if options.compile is not False:
        choices.append(Choice("compile", str(options.compile), "requested; the graph is split at DDP's buckets"))
    return arguments, choices + [Choice(name, str(value), "requested") for name, value in options.more.items()]


def find_unused(options: DDPOptions, environ: Mapping[str, str]) -> tuple[bool, str]:
    """Return `find_unused_parameters` and a prefix for its reason, which names the variable if it set the value.

    Raises LoopError for an invalid value of the variable DDP_FIND_UNUSED_PARAMETERS.
    """
    if options.find_unused_parameters is not None:
        return options.find_unused_parameters, ""
    value = environ.get(FIND_UNUSED_VARIABLE)
    if value is None:
        return False, ""
    if value.strip().lower() not in _SWITCHES:
        raise LoopError(
            "preparing a model",
            found=f"the variable {FIND_UNUSED_VARIABLE} is {value!r}",
            fix="Set it to 1 or 0, or pass find_unused_parameters= to prepare().",
        )
    return _SWITCHES[value.strip().lower()], f"set by {FIND_UNUSED_VARIABLE}={value}; "


_WHY: dict[str, dict[Any, str]] = {
    "forward_sync_buffers": {
        False: "no collective in the forward pass, so ranks may run different numbers of them; buffers are broadcast "
        "by prepare(), before an evaluation and before a save",
        True: "requested; every rank has to run the same number of forward passes",
    },
    "find_unused_parameters": {
        False: "no search through the graph in each forward pass; a parameter that an update leaves out is an error",
        True: "a search through the graph in each forward pass, and buckets in the order of definition",
    },
    "static_graph": {
        False: "a branch may be taken later, or on one rank only",
        True: "requested; an update that uses different parameters than the first one raises an error",
    },
    "gradient_as_bucket_view": {
        True: "gradients are views into the buckets, without a second copy in memory",
        False: "requested; gradients are copied into the buckets and back",
    },
}
"""Reasons by option and value."""
