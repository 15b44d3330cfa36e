# SPDX-License-Identifier: Apache-2.0
"""What is known of one DDP model of this rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ddpilot.guard.probes.bypass_call import BypassCalls
from ddpilot.guard.probes.gradients import Looks, look_at_gradients
from ddpilot.guard.probes.groups import describe_group
from ddpilot.guard.probes.reductions import Reductions
from ddpilot.guard.probes.synced import SyncedBackwards

_MAX_SAMPLES = 4
_HOOK_MODULES = ("torch.", "ddpilot.")
# These leave gradients as each rank has them, on purpose.
_LOCAL_HOOKS = ("noop_hook", "post_localSGD_hook")


class DdpModel:
    """A model wrapped by `ddp`, of which it keeps no reference. `ordinal`: the how manieth of its group, and era;
    `compiled`: the compiled part of recording, if there is one.
    """

    def __init__(self, ddp: Any, *, number: int, ordinal: str, compiled: Any = None) -> None:
        self.number = number
        self.ordinal = ordinal
        self.is_alone = dist.get_world_size(ddp.process_group) < 2
        """Whether its process group is this rank: each rank is to train a model of its own."""
        self.group = describe_group(ddp.process_group)
        self.reductions = Reductions()
        self.site: dict[str, Any] = {}
        self.why_local = ""
        """Why the newest gradients were not reduced; empty where they were."""
        self.why_site: dict[str, Any] = {}
        self.bypasses: BypassCalls | None = None
        """Where it is called past its wrapper, once it has been."""
        self.no_sync_site: dict[str, Any] = {}
        self.without_effect: dict[str, Any] = {}
        """Where `no_sync` was around a backward alone."""
        self.why_silent = ""
        """Why its gradients may differ between ranks."""
        self.find: Callable[[], Any] = weakref.ref(ddp)
        """Gives the wrapper; None when it is gone, which may be between two calls: to be called once for each use."""
        # DDP holds these parameters as long as it lives, so that their ids stay theirs.
        self.names = {
            id(parameter): name
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ddp.parameters_to_ignore
        }
        self.ignored = {
            id(parameter) for name, parameter in ddp.module.named_parameters() if name in ddp.parameters_to_ignore
        }
        # Not kept alive: of a wrapper that was thrown away unused, the program may go on with what it wrapped.
        trainable = [parameter for parameter in ddp.module.parameters() if id(parameter) in self.names]
        self.first: Callable[[], Any] = weakref.ref(trainable[0]) if trainable else _nothing
        """Gives its first trainable parameter; None when that is gone."""
        has_no_sync = not self.is_alone and not ddp.static_graph  # torch's fails with a static graph
        self.synced: SyncedBackwards | None = SyncedBackwards(trainable) if has_no_sync else None
        """Looks at its first steps; None once it is over."""
        self.synced_site: dict[str, Any] = {}
        """Where the newest backward is that it looked at."""
        self.born = {id(parameter): (parameter.dtype, parameter.device) for parameter in trainable}
        spread = range(0, len(trainable), -(-len(trainable) // _MAX_SAMPLES) or 1)
        looks: Looks = getattr(compiled, "look_at_gradients", look_at_gradients)([trainable[at] for at in spread])
        self.gradient_state, self.has_changed_since = looks
        """What a backward through the model changes; and whether it is another now."""

    def look_at_hooks(self) -> None:
        """Be silent about gradients that a communication hook, or `join`, may leave different."""
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
