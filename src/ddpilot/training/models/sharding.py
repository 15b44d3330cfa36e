# SPDX-License-Identifier: Apache-2.0
"""FSDP2: each rank keeps a shard of every parameter; a layer's parameters are gathered while it runs."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from ddpilot.errors import LoopError
from ddpilot.group.device import broadcast_tensors, is_divided, move
from ddpilot.group.process_group import Group
from ddpilot.group.protocol import GroupLike


def is_shard(value: object) -> bool:
    """True if `value` is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def has_shards(values: Iterable[object]) -> bool:
    """True if one of `values` is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None:
        for value in values:  # a generator would cost more than all the rest: this runs in each update
            if isinstance(value, kind):
                return True
    return False


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `tensor`, which shares its memory; `tensor` itself if it is not sharded."""
    return local_parts([tensor])[0]


@torch.no_grad()
def local_parts(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `local_part` of each of `tensors`."""
    # With gradients, or after detach(), to_local() is a dispatched operation, which costs 30 times as much.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return [one.to_local() if isinstance(one, kind) else one for one in tensors]


def gather(value: Any, *, keeps: bool) -> Any:
    """Return the whole tensor on the CPU if `keeps`, else None; a value that is not sharded as it is.

    Collective for a sharded tensor.
    """
    if not is_shard(value):
        return value
    whole = value.detach().to(value.device_mesh.device_type).full_tensor()
    return whole.cpu() if keeps else None


def divide_as(own: Any, value: Any) -> Any:
    """Return this rank's shard of the whole tensor `value`, divided as `own` is. Not collective.

    Returns `value` itself if `own` is not sharded or has another shape.
    """
    if not is_shard(own) or not isinstance(value, torch.Tensor) or is_shard(value) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    whole = value.detach().to(own.device_mesh.device_type)
    divided = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
    return divided.to(own.device)  # the CPU if it is offloaded


def is_true_everywhere(flag: torch.Tensor | bool, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `flag` (shape ()) combined over the ranks that share the sharded tensors `like`: 1 or 0. Collective.

    The result is on the device of the ranks' group, shape () and float32.
    """
    mesh = _mesh(like)
    lowest = torch.as_tensor(flag, dtype=torch.float32, device=mesh.device_type)
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh.get_group())
    return lowest


def total_norm(gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all `gradients`, the same on every rank. Collective if one of them is sharded.

    `norm_type`: above 0, or inf.
    """
    if not has_shards(gradients):
        return nn.utils.get_total_norm(gradients, norm_type)
    device, is_largest = local_part(gradients[0]).device, norm_type == math.inf
    norms = torch.zeros(2, dtype=torch.float64, device=device)  # of the shards, and of gradients that are whole
    for place, parts in enumerate(_split(gradients)):
        filled = [one for one in parts if one.numel()]
        if filled:
            norms[place] = nn.utils.get_total_norm(filled, norm_type).double()
    # The maximum of a number and NaN may be the number.
    powers = norms.nan_to_num(nan=math.inf, posinf=math.inf) if is_largest else norms.pow(norm_type)
    mesh = _mesh(gradients)
    of_shards = powers[:1].to(mesh.device_type)
    dist.all_reduce(of_shards, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=mesh.get_group())
    powers[:1] = of_shards
    norm = powers.max() if is_largest else powers.sum().pow(1.0 / norm_type)
    return norm.to(gradients[0].dtype)


def clip(parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Multiply the gradients of `parameters` so that their `norm` is at most `max_norm`. Not collective."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not has_shards(gradients):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch does
    for part in local_parts(gradients):
        part.mul_(factor.to(part.dtype))


def clip_values(parameters: Sequence[torch.Tensor], limit: float) -> None:
    """Clamp each element of the gradients of `parameters` to at most `limit` in absolute value. Not collective."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    if has_shards(gradients):
        for part in local_parts(gradients):
            part.clamp_(-limit, limit)
    else:
        nn.utils.clip_grad_value_(parameters, limit)


def _split(gradients: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    shards = local_parts([one for one in gradients if is_shard(one)])
    return shards, [one for one in gradients if not is_shard(one)]


def _mesh(tensors: Sequence[Any]) -> Any:
    """Return the mesh of ranks that share them. With `cpu_offload`, its device is not that of the tensors."""
    return next(one.device_mesh for one in tensors if is_shard(one))


_DID = 'preparing a model with `shard="parameters"`'


@dataclass(frozen=True, kw_only=True)
class ParameterSharding:
    """How `Loop.prepare(model, optimizer, shard=ParameterSharding(...))` shards parameters. LoopError if invalid.

    The chosen layers are gathered one at a time; the rest of the model is gathered as a whole.
    """

    layers: type[nn.Module] | tuple[type[nn.Module], ...] | None = None
    """The classes of the layers that are gathered one at a time, such as a transformer's block; None: by size."""
    min_parameters: int = 1_000_000
    """Without `layers`: the smallest layers with at least this many parameters are gathered one at a time."""
    reshard_after_forward: bool = True
    """True: a layer is gathered again for the backward pass. False: it stays gathered, which takes more memory and less
    communication. The rest of the model, with which the backward pass begins, is gathered once."""
    param_dtype: torch.dtype | None = None
    """The dtype in which layers are gathered and run, such as torch.bfloat16; None: their own."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which gradients are summed over ranks; None: `param_dtype`, or their own."""
    cpu_offload: bool = False
    """True if shards, their gradients and the optimizer's state are in CPU memory, where the optimizer steps."""
    methods: tuple[str, ...] = ()
    """Methods of the model besides `forward` that run it and use its parameters, such as ("encode",)."""

    def __post_init__(self) -> None:
        given: Any = self.layers
        kinds = () if given is None else given if isinstance(given, tuple) else (given,)
        if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
            raise _error(f"`layers` is {self.layers!r}", "Pass a class of layers, or a tuple of classes.")
        if self.min_parameters < 1:
            raise _error(f"`min_parameters` is {self.min_parameters}", "Pass 1 or more.")
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise _error(f"`{name}` is {dtype!r}", "Pass a floating-point dtype, such as torch.bfloat16, or None.")


def is_sharded(model: object) -> bool:
    """True if the parameters of `model` are sharded over ranks."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(model, kind)


def has_sharded_layer(model: nn.Module) -> bool:
    """True if the parameters of `model` or of a layer are sharded, such as those of the model in an AveragedModel."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and any(isinstance(layer, kind) for layer in model.modules())


def shard_parameters(
    model: nn.Module, group: GroupLike, options: ParameterSharding, moved: WeakIdKeyDictionary
) -> None:
    """Move `model` to the group's device and shard its parameters, in place, with the values of rank 0. Collective.

    With one rank it only moves the model. A model on the CPU is moved layer by layer. Adds the new parameter of each
    earlier one, whose values are freed, to `moved`. Raises LoopError for a model that cannot be sharded.
    """
    _check(model, group, options)
    if group.world_size == 1 or not isinstance(group, Group):
        move(model, group.device)
        return
    broadcast_tensors([*model.parameters(), *model.buffers()], group)
    before = dict(model.named_parameters())
    _shard_layers(model, group, options)
    after = dict(model.named_parameters())
    for name, parameter in before.items():
        moved[parameter] = after[name]


def _shard_layers(model: nn.Module, group: Group, options: ParameterSharding) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    mesh = DeviceMesh.from_group(group.process_group, group.device.type)
    precision = MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype)
    is_pinned = group.device.type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=is_pinned) if options.cpu_offload else OffloadPolicy()
    for layer in [*choose_layers(model, options), model]:
        layer.register_forward_hook(_own_output)  # before that of FSDP2, which comes next
        whole = [one for one in layer.parameters() if not is_shard(one)]
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=options.reshard_after_forward and layer is not model,
            mp_policy=precision,
            offload_policy=offload,
        )
        for old in whole:  # an optimizer may hold them until it is prepared: the device need not have the whole model
            old.data = old.data.new_empty(0)
    for name in options.methods:
        register_fsdp_forward_method(model, name)


@dataclass(frozen=True)
class ShardedOutline:
    """A model before its parameters were sharded, without their values, for copies: FSDP2 cannot copy a model."""

    model: nn.Module
    """Its parameters are on the device "meta"."""
    options: ParameterSharding

    @classmethod
    def of(cls, model: nn.Module, options: ParameterSharding) -> ShardedOutline | Exception:
        """Return the outline of `model`, which is not sharded yet, or the exception that copying it raised."""
        bare = {
            id(one): nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad) for one in model.parameters()
        }
        try:
            return cls(copy.deepcopy(model, dict[int, Any](bare)), options)
        except Exception as error:  # noqa: BLE001  (copying runs the user's code; only an average needs it)
            return error.with_traceback(None)  # which would keep the model

    def fill(self, outlined: nn.Module, model: nn.Module, group: GroupLike) -> None:
        """Shard `outlined`, a copy of the outline, as `model` is, with the values of `model`. Not collective."""
        assert isinstance(group, Group)  # else nothing is sharded
        _shard_layers(outlined, group, self.options)
        reshard(sharded_layers(model))
        filled: dict[int, Any] = {}  # one for each parameter, which may have several names
        state, own = model.state_dict(keep_vars=True), outlined.state_dict()
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and id(value) not in filled:
                copied = value.detach().to(own[name].dtype, copy=True)
                is_parameter = isinstance(value, nn.Parameter)
                filled[id(value)] = nn.Parameter(copied, value.requires_grad) if is_parameter else copied
        outlined.load_state_dict({name: filled.get(id(value), value) for name, value in state.items()}, assign=True)


def choose_layers(model: nn.Module, options: ParameterSharding) -> list[nn.Module]:
    """Return the layers of `model` to be gathered one at a time, inner ones first, without `model` itself.

    A layer that shares a parameter with the rest of the model is left to the layer around both.
    """
    places: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        places[id(parameter)] = places.get(id(parameter), 0) + 1
    chosen: list[nn.Module] = []
    taken: set[int] = set()
    for layer in _inner_first(model):
        own = [id(one) for _, one in layer.named_parameters(remove_duplicate=False)]
        if layer is model or isinstance(layer, nn.ModuleList | nn.ModuleDict) or not own:
            continue
        if any(own.count(number) < places[number] for number in set(own)):
            continue
        rest = sum(one.numel() for one in layer.parameters() if id(one) not in taken)
        if isinstance(layer, options.layers) if options.layers is not None else rest >= options.min_parameters:
            chosen.append(layer)
            taken.update(own)
    return chosen


def shard_optimizer_state(optimizer: Optimizer, moved: WeakIdKeyDictionary) -> None:
    """Let `optimizer` hold the sharded parameters in place of the earlier ones, with its state. Not collective.

    Raises LoopError for LBFGS, which needs all parameters together.
    """
    replaced = [one for group in optimizer.param_groups for one in group["params"] if one in moved]
    if not replaced:
        return
    if isinstance(optimizer, LBFGS):
        found = "LBFGS, which updates all parameters together"
        raise _error(found, "Use an optimizer that updates each parameter independently, such as AdamW or SGD.")
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            if parameter in moved:
                group["params"][place] = moved[parameter]
    for old in replaced:
        if old in optimizer.state:
            new = moved[old]
            values = optimizer.state.pop(old)
            optimizer.state[new] = {name: divide_as(new, value) for name, value in values.items()}


class _Alias(torch.autograd.Function):
    """The same values in the same memory, as a tensor that is not a view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        del ctx
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        del ctx
        return gradients[0]


def _own_output(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Replace views in the output of a layer: an in-place operation on a view would drop FSDP2's hook, which warns.

    `nn.Linear` returns a view for inputs of three dimensions.
    """
    del module, inputs
    if isinstance(output, torch.Tensor):
        return _alias(output)
    if any(_is_view(leaf) for leaf in tree_leaves(output)):
        return tree_map(_alias, output)
    return output


def _is_view(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value._base is not None and value.requires_grad


def _alias(value: Any) -> Any:
    return _Alias.apply(value) if _is_view(value) else value  # type: ignore[no-untyped-call]


def sharded_layers(model: nn.Module) -> list[Any]:
    """Return the layers of `model` that are gathered one at a time, with `model` itself."""
    return [layer for layer in model.modules() if is_sharded(layer)]


def reshard(layers: Iterable[Any]) -> None:
    """Free the gathered parameters of sharded `layers`, if forward passes without backward have left some."""
    for layer in layers:
        layer.reshard()


def _inner_first(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _inner_first(child, seen)
    yield module


def _check(model: nn.Module, group: GroupLike, options: ParameterSharding) -> None:
    if is_sharded(model):
        raise _error("it is sharded already", "Pass it to prepare() without `shard`.")
    if isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        raise _error(f"a {type(model).__name__}", "Pass the model itself; compile it afterwards.")
    if is_divided(model, group.device):
        raise _error("it is on several devices", "Leave it on one device, or on the CPU.")
    if any(isinstance(one, nn.parameter.UninitializedParameter) for one in model.parameters()):
        raise _error("a lazy layer that has no shape yet", "Run one batch through the model first.")
    if scalars := [name for name, one in model.named_parameters() if one.dim() == 0]:
        raise _error(f"a parameter without dimensions ({scalars[0]}), which cannot be divided", "Make its shape (1,).")
    types = sorted({str(one.dtype) for one in model.parameters()})
    if len(types) > 1:
        raise _error(f"parameters of {' and '.join(types)}", "Make all parameters of one dtype.")
    if unknown := [name for name in options.methods if not callable(getattr(model, name, None))]:
        raise _error(
            f"`methods` names {unknown[0]!r}, which {type(model).__name__} lacks", "Name methods of the model."
        )
    if options.layers is not None and not any(isinstance(one, options.layers) for one in model.modules()):
        raise _error(f"no layer is a {options.layers!r}", "Pass a class of layers that the model has.")


def _error(found: str, fix: str) -> LoopError:
    return LoopError(_DID, found=found, fix=fix)
