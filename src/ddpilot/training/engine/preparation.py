# SPDX-License-Identifier: Apache-2.0
"""`Preparation`: compile models, wrap them in DDP or shard them, register optimizers, and save all in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from ddpilot.errors import LoopError
from ddpilot.group.device import move
from ddpilot.group.process_group import Group
from ddpilot.training.engine.parts import LoopParts
from ddpilot.training.models.comm_hooks import hook_state, is_powersgd
from ddpilot.training.models.ddp import DDPOptions, unwrap, wrap
from ddpilot.training.models.optimizers import share_state
from ddpilot.training.models.sharding import (
    ShardedOutline,
    choose_layers,
    has_sharded_layer,
    is_sharded,
    shard_optimizer_state,
    shard_parameters,
)
from ddpilot.training.resume.tracked_state import has_state
from ddpilot.training.step.weight_averages import Averaging, WeightAverage


class Preparation:
    """Implements `Loop.prepare` and `Loop.average`."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._group = parts.group
        self._prepared = parts.prepared
        self._tracked = parts.tracked
        self._local = parts.local

    def prepare(self, things: tuple[Any, ...], options: DDPOptions) -> tuple[Any, ...]:
        """Prepare `things` and return them in order. Collective."""
        returned = []
        earlier = tuple(self._prepared.optimizers)
        if self._parts.precision.scaler is not None:
            _check_scaled(options)
        models = [one for one in things if isinstance(one, nn.Module) and not isinstance(one, AveragedModel)]
        for model in models:
            self._parts.precision.cast_weights(model)
            sharding = options.sharding
            if sharding is not None and not is_sharded(model) and self._group.world_size > 1:
                self._prepared.outlines[model] = ShardedOutline.of(model, sharding)
            compile_model(model, options)
            if sharding is not None:
                shard_parameters(model, self._group, sharding, self._prepared.moved)
        for thing in things:
            returned.append(self._prepare_one(thing, options))
            self._track(returned[-1], earlier)
        if self._local.is_on:
            for optimizer in self._prepared.optimizers:
                self._tracked.add_per_rank(optimizer, self._tracked.name_of(optimizer), instead="is that of rank 0")
        return tuple(returned)

    def _track(self, thing: Any, earlier: tuple[Optimizer, ...]) -> None:
        """Save `thing` with the checkpoints, in place of `earlier` optimizers of the same parameters."""
        if isinstance(thing, Optimizer):
            for old in self._prepared.replace_optimizers(earlier, thing):
                self._tracked.replace(old, thing)
        self._tracked.add(thing)
        own = self._prepared.find(thing)
        if own is not None and own.ddp is not None:
            name, state = f"{self._tracked.name_of(own.model)}_comm", hook_state(own.ddp)
            self._tracked.drop_per_rank(name)
            if state is not None:
                self._tracked.add_per_rank(state, name, instead="begins again")

    def _prepare_one(self, thing: Any, options: DDPOptions) -> Any:
        if isinstance(thing, AveragedModel):
            return self._prepare_averaged(thing, options)
        if isinstance(thing, nn.Module):
            return self._prepare_model(thing, options)
        if isinstance(thing, Optimizer):
            return self._prepare_optimizer(thing, options)
        if has_state(thing):
            if isinstance(thing, ReduceLROnPlateau):
                self._parts.updates.keep_objective()
            return thing
        raise LoopError(
            "preparing",
            found=f"a {type(thing).__name__}",
            fix="Pass models, optimizers and other objects with a state_dict; pass datasets to loop.loader().",
        )

    def _prepare_averaged(self, average: AveragedModel, options: DDPOptions) -> AveragedModel:
        if options.sharding is not None and not has_sharded_layer(average):
            shard_parameters(average.module, self._group, options.sharding, self._prepared.moved)
        elif self._prepared.has_sharded and not has_sharded_layer(average):
            found = "an AveragedModel without `shard`, and a model whose parameters are sharded"
            fix = 'Prepare both together: loop.prepare(model, average, optimizer, shard="parameters").'
            raise LoopError("preparing", found=found, fix=fix)
        if has_sharded_layer(average):
            average.n_averaged = average.n_averaged.to(self._group.device)
        else:
            move(average, self._group.device)
        self._local.add_average(average)
        return average

    def _prepare_model(self, given: nn.Module, options: DDPOptions) -> nn.Module:
        model, choices = wrap(given, self._group, options)
        prepared = self._prepared.add_model(model, choices)
        self._parts.updates.add_model(prepared)
        if prepared.ddp is not None and options.sync_every is not None:
            self._local.add(prepared.ddp, options.sync_every, options.sync_start)
            self._parts.updates.let_ranks_differ()
        self._parts.buffers.add(prepared)
        return model

    def _prepare_optimizer(self, optimizer: Optimizer, options: DDPOptions) -> Optimizer:
        if isinstance(self._group, Group):
            share_state(optimizer, self._group)
        shard_optimizer_state(optimizer, self._prepared.moved)
        if options.shard == "optimizer":
            from ddpilot.training.models.zero import shard_optimizer  # slow to import

            optimizer = shard_optimizer(optimizer, self._group)
        self._prepared.add_optimizer(optimizer)
        self._parts.updates.add_optimizer(optimizer)
        return optimizer

    def average(self, model: nn.Module, how: Averaging | float) -> WeightAverage:
        """Implement `Loop.average`."""
        inner = unwrap(model)
        did = "averaging weights"
        if all(one.module is not inner for one in self._prepared.models):
            found = f"a {type(inner).__name__} that was not prepared"
            raise LoopError(did, found=found, fix="Write model = loop.prepare(model) first.")
        options = how if isinstance(how, Averaging) else Averaging(decay=how)
        if is_sharded(inner):
            outline = self._prepared.outlines.get(inner)
            if outline is None:
                fix = 'Prepare the model with shard="parameters" in this Loop.'
                raise LoopError(did, found="a model that a different Loop has sharded", fix=fix)
            if isinstance(outline, Exception):
                found = f"copy.deepcopy of a {type(inner).__name__} raised {type(outline).__name__}: {outline}"
                fix = "Leave what cannot be copied out of the model, or define its `__deepcopy__`."
                raise LoopError(did, found=found, fix=fix) from outline
            average = WeightAverage(outline.model, options)
            outline.fill(average.module, inner, self._group)
        else:
            average = WeightAverage(inner, options)
        self._tracked.add(average)
        self._parts.averages.add(average, inner)
        self._local.add_average(average)
        return average


def _check_scaled(options: DDPOptions) -> None:
    """Raise LoopError for options that fp16 and its loss scale rule out."""
    did, fix = "preparing a model", "Use precision='bf16', or leave `{}` out."
    if is_powersgd(options.comm):
        found = '`comm="powersgd"` with `precision="fp16"`, whose scale changes between updates'
        raise LoopError(did, found=found, fix=fix.format("comm"))
    if options.sync_every is not None:
        found = '`sync_every` with `precision="fp16"`, whose ranks would skip different updates'
        raise LoopError(did, found=found, fix=fix.format("sync_every"))
    if options.sharding is not None:
        found = 'a Loop with `precision="fp16"`, whose scaled gradients would be sharded'
        fix = "Use precision='bf16', or ParameterSharding(param_dtype=...)."
        raise LoopError('preparing with `shard="parameters"`', found=found, fix=fix)


_PREPARING = "preparing a model with `compile`"


def compile_model(model: nn.Module, options: DDPOptions) -> None:
    """Let calls of `model` run as compiled, with the same keys in its state_dict; it is compiled in its first call.

    torch recommends this order. DDP's buckets are seen by the compiler, which splits the graph at them
    (`torch._dynamo.config.optimize_ddp`), so that gradients are all-reduced while the backward pass runs. If parameters
    are sharded, each layer that is gathered by itself is compiled by itself. Not collective. Raises LoopError for a
    model that is compiled already in a different way.
    """
    if options.compile is False:
        return
    arguments = {} if options.compile is True else dict(options.compile)
    if hasattr(model, "_orig_mod"):
        fix = "Pass the model itself; or leave `compile` out, as the compiled model works as well."
        raise LoopError(_PREPARING, found="the result of torch.compile(model): it is compiled already", fix=fix)
    layers = [model]
    if options.sharding is not None and not is_sharded(model):
        layers = choose_layers(model, options.sharding) or layers
    if is_sharded(model) and any(_compiled(one) is not None for one in model.modules()):
        return  # by an earlier call
    codes: dict[object, CodeType] = {}
    for layer in layers:
        forward = layer.forward if layer is model else _with_own_code(layer, codes)
        _compile(layer, forward, arguments)


def _with_own_code(layer: nn.Module, codes: dict[object, CodeType]) -> Callable[..., Any]:
    """Return a function that calls the `forward` of `layer`, with a code object for all layers of this class and size.

    The compiler keeps at most `torch._dynamo.config.recompile_limit` graphs for one code object, 8, and then leaves the
    layer uncompiled. All classes of torch's own, such as nn.Linear, would have the same one.
    """
    forward: Callable[..., Any] = layer.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    sizes = tuple((name, one.shape, one.requires_grad) for name, one in layer.named_parameters())
    call.__code__ = codes.setdefault((type(layer), sizes), call.__code__.replace())
    return call


def _compile(module: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    known = _compiled(module)
    if known is not None and known.arguments == arguments:
        return
    if known is None and module._compiled_call_impl is not None:
        found = f"a {type(module).__name__} on which `compile()` was called: it is compiled already"
        raise LoopError(_PREPARING, found=found, fix="Leave one of the two out.")
    module._compiled_call_impl = CompiledCall(module, forward, arguments)


def _compiled(module: nn.Module) -> CompiledCall | None:
    call: object = module._compiled_call_impl
    return call if isinstance(call, CompiledCall) else None


class CompiledCall:
    """Calls a module with its `forward` compiled, and explains the compiler's errors.

    Its hooks run outside of the compiled code: those of `fully_shard`, which gather and free the parameters, would
    break the graph. nn.Module leaves this object out when a module is copied or pickled.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        """Those of torch.compile."""
        self._module = module
        self._forward = torch.compile(forward, **arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Raises LoopError where the compiler fails."""
        attributes = self._module.__dict__
        own = attributes.get("forward")
        attributes["forward"] = self._forward  # for this call alone: a copy of the module must not have it
        try:
            return self._module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            explained = explain_compiler_error(error, type(self._module).__name__, self.arguments)
            if explained is None:
                raise
            raise explained from error
        finally:
            if own is None:
                del attributes["forward"]
            else:
                attributes["forward"] = own


def explain_compiler_error(error: Exception, name: str, arguments: Mapping[str, Any]) -> LoopError | None:
    """Return the error for a graph that breaks and for a backend that fails; None for any other error."""
    from torch._dynamo.exc import BackendCompilerFailed, Unsupported

    did = f"running {name}, which `compile` compiles"
    if isinstance(error, BackendCompilerFailed):
        first = f"{type(error.inner_exception).__name__}: {error.inner_exception}".splitlines()[0]
        fix = "Install what it lacks, such as a C++ compiler; or use compile={'backend': 'aot_eager'}, or no `compile`."
        return LoopError(did, found=f"its backend failed: {first}", fix=fix)
    if not isinstance(error, Unsupported) or not arguments.get("fullgraph"):
        return None
    first = next((one.strip() for one in str(error).splitlines() if one.strip()), type(error).__name__)
    stack: Sequence[Any] = getattr(error, "real_stack", None) or ()
    line = f" at {stack[-1].filename}:{stack[-1].lineno} (`{stack[-1].line}`)" if stack else ""
    fix = "Change that line, or leave `fullgraph` out: the model then runs as several compiled graphs."
    return LoopError(did, found=f"the graph breaks{line}, and `fullgraph` is True: {first}", fix=fix)
