# SPDX-License-Identifier: Apache-2.0
"""A rank's device and backend, chosen from detected facts; memory, random states and events of any accelerator."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddpilot.environments.nvml import count_accelerators, find_pci_place
from ddpilot.errors import GroupError
from ddpilot.group.protocol import GroupLike

_NO_BACKENDS = frozenset({"undefined", "fake"})
"""Names that torch lists among its backends but that do not connect ranks."""
_DID = "choosing device and backend"
_HOST_BACKENDS = frozenset({"", "gloo", "mpi"})
"""Backends whose collectives are complete when they return, also for device tensors; "": no backend for the device."""


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about this process, detected before it uses a device."""

    accelerator: str | None
    """Device type that this build of torch supports ("cuda", "xpu", "mps", ...); None for a CPU build."""
    count: int
    """Number of devices of that type that are visible to this process."""
    local_rank: int
    """Rank within this node, 0 to the number of ranks on the node - 1."""
    accelerator_backend: str | None = None
    """Backend that torch registers for the device type ("nccl" for cuda); None if there is none (mps)."""
    backends: frozenset[str] = frozenset({"gloo"})
    """Backends available in this build of torch."""


@dataclass(frozen=True)
class DeviceChoice:
    """The device and backend chosen for this rank, and the reason if the choice is not the obvious one."""

    device: str
    """In torch's notation: "cpu", "cuda:0"."""
    backend: str
    """As passed to `init_process_group`: "gloo", "nccl", "cpu:gloo,cuda:nccl"."""
    explicit: bool = False
    """True if the backend was requested, by argument or by DDPILOT_BACKEND."""
    why: str = ""
    """One sentence if the choice differs from the obvious one, else empty. Shown as a warning on local rank 0."""


def resolve_device(facts: DeviceFacts, backend: str | None = None) -> DeviceChoice:
    """Choose device and backend from `facts`. `backend`: the requested backend, None for the default.

    The device index is `local_rank` modulo the number of visible devices. With one visible device this is device 0,
    whether the scheduler shows each rank its own device or all ranks share one; `share_devices` distinguishes the two
    by the devices' identities. Raises GroupError if a backend is not available.
    """
    _require(facts, backend)
    kind, native = facts.accelerator, facts.accelerator_backend
    if kind is None or facts.count == 0:
        if backend is not None and native is not None and backend == native:
            raise GroupError(
                _DID,
                found=f"backend {backend!r} was requested, but no {kind} device is visible to this process",
                fix="Use backend='gloo' on CPU, or check the driver and CUDA_VISIBLE_DEVICES.",
            )
        return DeviceChoice("cpu", backend or "gloo", backend is not None)
    device = f"{kind}:{facts.local_rank % facts.count}"
    if backend is not None:
        return DeviceChoice(device, backend, True)
    if native is None:
        return DeviceChoice("cpu", "gloo", why=f"PyTorch has no collectives on {kind}: this group uses the CPU")
    if native not in facts.backends:
        return DeviceChoice(device, "gloo", why=f"This build of PyTorch has no {native}: this group uses gloo")
    return DeviceChoice(device, f"cpu:gloo,{kind}:{native}" if "gloo" in facts.backends else native)


def backend_of(backends: str, kind: str) -> str:
    """The backend for tensors of device type `kind` in `backends`, which is as passed to `init_process_group`.

    "" if there is none: "cpu:gloo,cuda:nccl" gives "nccl" for "cuda" and "" for "xpu".
    """
    parts = [part.strip().rpartition(":") for part in backends.lower().split(",")]
    return next((name for device, _, name in parts if device in ("", kind)), "")


def is_asynchronous(backends: str, device: torch.device) -> bool:
    """True if collectives on tensors of `device` return before they complete, so that errors and results come later.

    This applies to the backends of accelerators (NCCL), which run collectives on streams of the device.
    """
    return device.type != "cpu" and backend_of(backends, device.type) not in _HOST_BACKENDS


def share_devices(choice: DeviceChoice, sharing: Mapping[str, tuple[int, ...]]) -> DeviceChoice:
    """Adjust the choice once every rank's device is known. `sharing`: device identity -> ranks, for shared devices.

    A device's own backend (NCCL) rejects two ranks on one device: the default then becomes gloo, and an explicit
    backend raises GroupError. Every rank passes the same `sharing`, so that all ranks make the same choice.
    """
    device = torch.device(choice.device)
    if not sharing or not is_asynchronous(choice.backend, device):
        return choice
    own = backend_of(choice.backend, device.type)
    named = "; ".join(f"ranks {', '.join(map(str, ranks))} on {device}" for device, ranks in sharing.items())
    if choice.explicit or device.type not in dist.Backend.backend_capability["gloo"]:
        raise GroupError(
            _DID,
            found=f"backend {choice.backend!r} needs one GPU per rank, but several ranks share one: {named}",
            fix="Start at most as many ranks as there are GPUs, or use backend='gloo'."
            if device.type in dist.Backend.backend_capability["gloo"]
            else "Start at most as many ranks as there are devices.",
        )
    return replace(choice, backend="gloo", why=f"Several ranks share a GPU ({named}): gloo is used instead of {own}")


def detect_device_facts(environ: Mapping[str, str], local_rank: int) -> DeviceFacts:
    """Detect the facts about this build of torch and this machine. Does not create a device context."""
    kind = _accelerator_of_build()
    return DeviceFacts(
        accelerator=kind,
        count=0 if kind is None else _count(kind, environ),
        local_rank=local_rank,
        accelerator_backend=None if kind is None else dist.Backend.default_device_backend_map.get(kind),
        backends=frozenset(name for name in dist.Backend.backend_list if dist.is_backend_available(name))
        - _NO_BACKENDS,
    )


def use_device(choice: DeviceChoice) -> torch.device:
    """Set the chosen device as the current device of this process and return it. Call this before creating tensors.

    Raises GroupError if the machine has the device but this build of PyTorch cannot use it.
    """
    device = torch.device(choice.device)
    # Some accelerators have at most one device and no function to select it (mps).
    if device.type != "cpu" and (choose := getattr(torch.get_device_module(device), "set_device", None)) is not None:
        try:
            choose(device.index)
        except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
            raise GroupError(
                f"choosing {device}",
                found=f"PyTorch {torch.__version__} cannot use it: {str(error).splitlines()[0]}",
                fix="Install a driver and a build of PyTorch that fit each other and the device, or hide the device "
                "(CUDA_VISIBLE_DEVICES= for NVIDIA's) and run on the CPU.",
            ) from error
    return device


def device_identity(device: torch.device) -> str:
    """A name that is equal on two ranks of a host if and only if they share the device; "" if unknown."""
    if device.type == "cpu":
        return ""
    describe = getattr(torch.get_device_module(device), "get_device_properties", None)
    if describe is None:
        return ""
    properties = describe(device)
    uuid = getattr(properties, "uuid", None)
    named = "" if uuid is None else str(uuid)
    if device.type == "cuda" and torch.version.cuda is not None:
        place = _pci_place(properties) or find_pci_place(named)
        return name_nvidia(place, named, getattr(properties, "name", ""))
    return named and f"{device.type} device {named}"


def name_nvidia(place: str, uuid: str, model: str) -> str:
    """Identity of an NVIDIA device at PCI location `place` ("" if unknown), following NCCL's notion of one device.

    NCCL rejects two MIG instances of one GPU, which share its PCI location but usually have different UUIDs: without a
    location, all MIG instances of a host count as the same device.
    """
    if place:
        return f"cuda device {place}"
    if "MIG" in model:
        return "cuda device of a GPU that is split by MIG"
    return uuid and f"cuda device {uuid}"


def _pci_place(properties: object) -> str:
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    known = domain is not None and bus is not None and slot is not None
    return f"{domain:08x}:{bus:02x}:{slot:02x}" if known else ""


def _accelerator_of_build() -> str | None:
    # torch.accelerator is not used here: in torch 2.6 it initializes the driver and fails if there is no device.
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "cuda"
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:
        return None
    return None if found is None else found.type


def _count(kind: str, environ: Mapping[str, str]) -> int:
    if kind == "cuda" and torch.version.cuda is not None and (count := count_accelerators(environ)) > 0:
        return count
    return int(torch.get_device_module(kind).device_count())


def _require(facts: DeviceFacts, backend: str | None) -> None:
    asked = (backend or "gloo").split(",")
    missing = [name for part in asked if (name := part.rpartition(":")[2].lower()) not in facts.backends]
    if not missing or (backend is None and facts.accelerator_backend in facts.backends and facts.count):
        return
    has = ", ".join(sorted(facts.backends)) or "none"
    raise GroupError(
        _DID,
        found=f"this build of PyTorch has no {missing[0]!r} backend; it has: {has}",
        fix="Install a build that has it, or pass a backend from this list."
        if facts.backends
        else "Install a different build.",
    )


_KNOWN = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "meta")
"""Device types for which `Module.to` moves a parameter by swapping its `.data`."""
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def runs_behind(device: torch.device) -> bool:
    """True if calls on `device` return before the work is done, and events show when it is.

    False for the CPU, and for MPS, which has neither events of `torch.Event` nor a random state for each device.
    """
    return device.type not in ("cpu", "mps")


def wire_device(group: GroupLike) -> torch.device:
    """Return the device for small host-side messages: the CPU if `group` has a gloo backend, else the group's device.

    A tensor on an accelerator is copied there and back, and the host waits for all work queued before it.
    """
    return torch.device("cpu") if "gloo" in group.backend else group.device


_BROADCAST_BYTES = 25 << 20
"""Size up to which several tensors are sent in one broadcast."""


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: GroupLike, src: int = 0) -> None:
    """Overwrite `tensors`, of any dtype, memory format and device, with those of rank `src`. Collective.

    They are sent as bytes on the group's device, since not every backend broadcasts bool or "channels last" tensors.
    """
    buckets: list[list[torch.Tensor]] = []
    num_bytes = 0
    for tensor in (one.detach() for one in tensors if one.numel() and group.world_size > 1):
        num_bytes += tensor.nbytes
        if not buckets or num_bytes > _BROADCAST_BYTES:
            buckets.append([])
            num_bytes = tensor.nbytes
        buckets[-1].append(tensor)
    for bucket in buckets:
        parts = [tensor.to(group.device).contiguous().reshape(-1).view(torch.uint8) for tensor in bucket]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        group.broadcast(flat, src)
        for tensor, part in zip(bucket, torch.split(flat, [one.nbytes for one in bucket]), strict=True):
            if part.data_ptr() != tensor.data_ptr():
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a part may be misaligned


def device_ids(model: torch.nn.Module, device: torch.device) -> list[int] | None:
    """Return the `device_ids` argument of DistributedDataParallel for a rank on `device`.

    None on the CPU, for a device without an index, and for a model that is divided over several devices.
    """
    is_numbered = device.type != "cpu" and device.index is not None
    return [device.index] if is_numbered and not is_divided(model, device) else None


def is_divided(model: torch.nn.Module, device: torch.device) -> bool:
    """True if the parameters and buffers of `model` are on more than one accelerator of the type of `device`."""
    places = {tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors}
    return device.type != "cpu" and sum(place.type == device.type for place in places) > 1


def move(model: torch.nn.Module, device: torch.device) -> None:
    """Move `model` to `device` in place; its parameters remain the same objects, which an optimizer may already hold.

    `Module.to` alone replaces them on device types that torch does not know itself (out-of-tree accelerators).
    """
    future: Any = torch.__future__
    is_there = all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))
    swaps = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(swaps or (device.type not in _KNOWN and not is_there))
    try:
        model.to(device)
    finally:
        future.set_swap_module_params_on_conversion(swaps)


@contextmanager
def fork_rng(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the random states of `random`, NumPy, and torch on the CPU and `devices` at the end of the context."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with _fork_torch_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _fork_torch_rng(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    behind = {device for device in devices if runs_behind(device)}
    kinds = {device.type for device in behind}
    if not kinds:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=sorted({device.index for device in behind}), device_type=kinds.pop())


def rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of the generator of `device`, as a uint8 tensor on the CPU."""
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of the generator of `device` to `state`, as returned by `rng_state`."""
    torch.get_device_module(device).set_rng_state(state, device)


def reset_peak(device: torch.device) -> None:
    """Reset the peak that `peak_bytes` returns. Does nothing on the CPU."""
    if device.type != "cpu" and (reset := _memory_function(device, "reset_peak_memory_stats")) is not None:
        reset(device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors on `device`, in bytes; 0 on the CPU and on devices that do not measure it."""
    measure = None if device.type == "cpu" else _memory_function(device, "max_memory_allocated")
    return 0 if measure is None else int(measure(device))


def memory_facts(device: torch.device) -> tuple[int, int, int] | None:
    """Return the free, total and torch-reserved bytes of `device`; None if they are unknown.

    The reserved bytes are those of this process.
    """
    if device.type == "cpu":
        return None
    measure = _memory_function(device, "mem_get_info") or _memory_function(device, "get_memory_info")
    hold = _memory_function(device, "memory_reserved")
    if measure is None or hold is None:
        return None
    free, total = measure(device)
    return int(free), int(total), int(hold(device))


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error` reports that memory ran out, on an accelerator or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def empty_cache(device: torch.device) -> None:
    """Release cached memory that no tensor uses to `device`. Does nothing on the CPU."""
    if device.type != "cpu" and (empty := _memory_function(device, "empty_cache")) is not None:
        empty()


def current_event(device: torch.device, *, enable_timing: bool = False) -> torch.Event:
    """Record an event in the current stream of `device`, after the work that is queued there."""
    event = torch.Event(device, enable_timing=enable_timing)
    event.record(torch.accelerator.current_stream(device))
    return event


def _memory_function(device: torch.device, name: str) -> Any:
    # torch.accelerator has these functions since torch 2.9; the modules of some devices lack them.
    return getattr(torch.get_device_module(device), name, None) or getattr(torch.accelerator, name, None)


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Return the current states as numbers and tensors, which load without executing code.

    `device`: this rank's; the state of its generator is included, under its type ("cuda"), if it has one.
    """
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if device is not None and runs_behind(device):
        states[device.type] = rng_state(device)
    return states


def restore_rng(states: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore the states that `capture_rng` returned; `device`: this rank's.

    The state of an accelerator is skipped on a rank whose device has a different type.
    """
    random.setstate(states["python"])
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if device is not None and runs_behind(device) and device.type in states:
        set_rng_state(states[device.type], device)
