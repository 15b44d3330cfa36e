# SPDX-License-Identifier: Apache-2.0
"""See collectives through the hooks of torch's process groups, in torch 2.14 and later.

The second choice: hooks cost a third of what our kernels cost, but see neither the reduce-op nor tags nor split sizes,
miss `monitored_barrier`, and belong to one group each, so they must be registered on every group that is created.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddpilot.record.operations import Operation, spell
from ddpilot.record.pending import Ticket
from ddpilot.record.recorder import Begin, Recorder, Started

HOOK_ID = 0xDD9107
_REGISTER = "_register_process_group"


def has_hooks() -> bool:
    """True if this torch has them."""
    from torch._C._distributed_c10d import ProcessGroup

    return hasattr(ProcessGroup, "register_pre_hook") and hasattr(ProcessGroup, "register_post_hook")


def are_installed(registry: Any) -> bool:
    """True if a recording has put hooks on this process's groups; `registry` as for `install_hooks`."""
    return hasattr(getattr(registry, _REGISTER), "__ddpilot__")


def install_hooks(recorder: Recorder, registry: Any) -> Callable[[], None]:
    """Register hooks on all existing groups and on groups created later. Returns a function that removes them.

    `registry` is `torch.distributed.distributed_c10d`.
    """
    register = getattr(registry, _REGISTER)
    operations = {name: _plan(name) for name in _hook_names()}
    watch = {name: (recorder.begin_of(plan), recorder.started_of(plan)) for name, plan in operations.items()}

    def register_with_hooks(name: str, group: Any) -> None:
        register(name, group)
        _attach(watch, group)

    register_with_hooks.__ddpilot__ = True  # type: ignore[attr-defined]

    def uninstall() -> None:
        if getattr(registry, _REGISTER) is register_with_hooks:
            setattr(registry, _REGISTER, register)
        for group in registry._world.pg_map:
            group.unregister_pre_hook(HOOK_ID)
            group.unregister_post_hook(HOOK_ID)

    setattr(registry, _REGISTER, register_with_hooks)
    for group in registry._world.pg_map:
        _attach(watch, group)
    return uninstall


def _hook_names() -> list[str]:
    from torch._C import _distributed_c10d

    names: Any = _distributed_c10d
    return list(names.HookOpName.__members__)


def _plan(name: str) -> Operation:
    is_p2p = name in ("SEND", "RECV")
    # Indices into the tuple that `_attach` builds from the arguments of a hook.
    return Operation(
        name=spell(name.lower()),
        operator=f"hook::{name}",
        group_at=0,
        inputs_at=(1,),
        outputs_at=(2,),
        root_at=-1 if is_p2p else 3,
        peer_at=3 if is_p2p else -1,
        async_at=4,
        work_at=-1,
        is_p2p=is_p2p,
    )


def _attach(watch: Mapping[str, tuple[Begin, Started]], group: Any) -> None:
    from weakref import ref

    # The hooks live as long as the group, so they must not keep it alive.
    weak_group = ref(group)
    begun: dict[int, tuple[Ticket | None, Started]] = {}

    def before(told: Any) -> None:
        root = told.root if told.root >= 0 else None
        args = (weak_group(), told.input_tensors, told.output_tensors, root, told.async_op)
        begin, started = watch[told.name.name]
        begun[told.op_id] = begin(args), started

    def after(told: Any) -> None:
        if told.op_id in begun:
            ticket, started = begun.pop(told.op_id)
            started(ticket, told.work)

    group.register_pre_hook(HOOK_ID, before)
    group.register_post_hook(HOOK_ID, after)
