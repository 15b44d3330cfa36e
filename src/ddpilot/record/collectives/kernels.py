# SPDX-License-Identifier: Apache-2.0
"""See every collective through kernels on the dispatch key that every `c10d::` operator passes first.

They see collectives from Python, C++ and compiled graphs alike, of groups that are created later too. (The hooks on
process groups that torch has from 2.14 on see neither reduce-op nor tag nor split sizes.) Functions import torch
themselves: reading a ring imports this package and must work without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

from ddpilot.record.collectives.operations import Operation, plan_operation
from ddpilot.record.collectives.recorder import Recorder

NAMESPACE = "c10d"
DISPATCH_KEY = "BackendSelect"


@functools.cache
def plan_operations() -> tuple[Mapping[str, Operation], Mapping[str, str]]:
    """Plan every `c10d::` operator of this torch: those that are recorded, by name, and why each other one is not."""
    import torch

    recorded: dict[str, Operation] = {}
    left_out: dict[str, str] = {}
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith(f"{NAMESPACE}::"):
            plan = plan_operation(name, find_overload(name)._schema)
            if isinstance(plan, str):
                left_out[name] = plan
            else:
                recorded[name] = plan
    return recorded, left_out


def find_overload(name: str) -> Any:
    """Return the operator named `name`, such as ``c10d::send`` or ``c10d::send.some_overload``."""
    import torch

    base, _, overload = name.removeprefix(f"{NAMESPACE}::").partition(".")
    return getattr(getattr(torch.ops.c10d, base), overload or "default")


def find_watched(operators: Iterable[str]) -> str:
    """Return the first of `operators` that already has a kernel on our dispatch key; empty if none has."""
    import torch

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return next((name for name in operators if has_kernel(name, DISPATCH_KEY)), "")


def install_kernels(recorder: Recorder, operations: Mapping[str, Operation]) -> Callable[[], None]:
    """Register our kernels for `operations`, which must have none on our dispatch key. Returns an undo function."""
    import torch

    library: Any = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name, operation in operations.items():
            kernel = _make_kernel(recorder, operation, find_overload(name))
            library.impl(name.removeprefix(f"{NAMESPACE}::"), kernel, DISPATCH_KEY, with_keyset=True)
    except BaseException:
        library._destroy()
        raise
    destroy: Callable[[], None] = library._destroy
    return destroy


def _make_kernel(recorder: Recorder, operation: Operation, overload: Any) -> Callable[..., Any]:
    import torch

    rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    redispatch = overload._handle.redispatch_boxed
    begin, started, cut_short = recorder.begin_of(operation), recorder.started_of(operation), recorder.cut_short
    after: dict[int, Any] = {}  # by raw bits of the incoming key set: a lookup takes a third of the time of `&`

    def kernel(keyset: Any, *args: Any) -> Any:
        ticket = None
        try:
            ticket = begin(args)
            bits = keyset.raw_repr()
            result = redispatch(after.get(bits) or after.setdefault(bits, keyset & rest), *args)
            started(ticket, result)
        except BaseException as error:
            cut_short(ticket, error)
            raise
        return result

    _keep_dynamo_out(kernel.__code__)
    return kernel


def _keep_dynamo_out(code: CodeType) -> None:
    # The kernel runs inside compiled regions, where Dynamo would inspect its frame and the frames of what it calls.
    import torch

    eval_frame: Any = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    else:  # torch 2.6 and 2.7
        eval_frame.skip_code(code)
