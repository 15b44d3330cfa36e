# SPDX-License-Identifier: Apache-2.0
"""What guard knows about one DDP model of this rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ddpilot.guard.probes.gradients import Looks, look_at_gradients
from ddpilot.guard.probes.parameters.bypass import BypassCalls
from ddpilot.guard.probes.process_groups import describe_group
from ddpilot.guard.probes.reductions import Reductions
from ddpilot.guard.probes.synced import SyncedBackwards

_MAX_SAMPLES = 4
_HOOK_MODULES = ("torch.", "ddpilot.")
# These hooks leave gradients different between ranks on purpose.
_LOCAL_HOOKS = ("noop_hook", "post_localSGD_hook")


class DdpModel:
    """A model wrapped by `ddp`, to which it keeps no reference.

    `ordinal`: "<era>/<index>", which DDP model of its group this is, counted from 0 in each era. `compiled`: the
    compiled recorder or None.
    """

    def __init__(self, ddp: Any, *, number: int, ordinal: str, compiled: Any = None) -> None:
        self.number = number
        self.ordinal = ordinal
        self.is_alone = dist.get_world_size(ddp.process_group) < 2
        """True if this rank is alone in its process group: each rank trains its own model."""
        self.group = describe_group(ddp.process_group)
        self.reductions = Reductions()
        self.site: dict[str, Any] = {}
        self.why_local = ""
        """Why the last gradients were not reduced; empty if they were."""
        self.why_site: dict[str, Any] = {}
        self.bypasses: BypassCalls | None = None
        """Finds calls past the wrapper; None until there has been one."""
        self.no_sync_site: dict[str, Any] = {}
        self.without_effect: dict[str, Any] = {}
        """The line of a backward inside `no_sync` whose forward was outside of it, so that `no_sync` had no effect."""
        self.why_silent = ""
        """Why its gradients may differ between ranks."""
        self.find: Callable[[], Any] = weakref.ref(ddp)
        """Returns the wrapper, or None once it has been freed, which can happen between two calls: call it once per
        use."""
        # DDP holds these parameters as long as it lives, so their ids are not reused.
        self.names = {
            id(parameter): name
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ddp.parameters_to_ignore
        }
        self.ignored = {
            id(parameter) for name, parameter in ddp.module.named_parameters() if name in ddp.parameters_to_ignore
        }
        # Not kept alive: the program may continue to use the module of a wrapper that was deleted unused.
        trainable = [parameter for parameter in ddp.module.parameters() if id(parameter) in self.names]
        self.first: Callable[[], Any] = weakref.ref(trainable[0]) if trainable else _nothing
        """Returns the first trainable parameter, or None once it has been freed."""
        has_no_sync = not self.is_alone and not ddp.static_graph  # torch's `no_sync` fails with a static graph
        self.synced: SyncedBackwards | None = SyncedBackwards(trainable) if has_no_sync else None
        """Observes the first steps; None when that is finished."""
        self.synced_site: dict[str, Any] = {}
        """Line of the last backward that `synced` observed."""
        self.born = {id(parameter): (parameter.dtype, parameter.device) for parameter in trainable}
        spread = range(0, len(trainable), -(-len(trainable) // _MAX_SAMPLES) or 1)
        looks: Looks = getattr(compiled, "look_at_gradients", look_at_gradients)([trainable[at] for at in spread])
        self.gradient_state, self.has_changed_since = looks
        """`gradient_state` returns a state that a backward through the model changes; `has_changed_since` compares with
        it."""

    def look_at_hooks(self) -> None:
        """Do not report gradients that a communication hook or `join` may leave different between ranks."""
        ddp = self.find()
        if ddp is None:
            return
        if ddp._join_config.enable:
            self.why_silent = "join"
        for hook, _ in getattr(ddp, "_comm_hooks", ()):
            name = getattr(hook, "__name__", type(hook).__name__)
            if name in _LOCAL_HOOKS or not str(getattr(hook, "__module__", "")).startswith(_HOOK_MODULES):
                self.why_silent = f"hook {name}"


def _nothing() -> None:
    return None
