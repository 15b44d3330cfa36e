# SPDX-License-Identifier: Apache-2.0
"""`compile_model`: torch.compile in place, before a model is wrapped in DDP or sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn

from ddpilot.errors import LoopError
from ddpilot.training.models.ddp_options import DDPOptions
from ddpilot.training.models.sharding import choose_layers, is_sharded

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
