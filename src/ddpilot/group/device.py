# SPDX-License-Identifier: Apache-2.0
"""Which device and which backend this rank uses: facts are found here, decisions are pure functions of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ddpilot.errors import GroupError
from ddpilot.group.devices_count import count_accelerators

_NO_BACKENDS = frozenset({"undefined", "fake"})
"""What torch lists among its backends and what connects no ranks."""
_DID = "choosing device and backend"


@dataclass(frozen=True)
class DeviceFacts:
    """What is known about this process before anything touched a device."""

    accelerator: str | None
    """Device type that this build of torch can drive ("cuda", "xpu", "mps", ...); None for a CPU build."""
    count: int
    """How many such devices this process can see."""
    local_rank: int
    """0 to the number of ranks on this node - 1."""
    accelerator_backend: str | None = None
    """Backend that torch registers for that device type ("nccl" for cuda); None where there is none (mps)."""
    backends: frozenset[str] = frozenset({"gloo"})
    """Backends that this build of torch has."""


@dataclass(frozen=True)
class DeviceChoice:
    """What was decided for this rank, and why where someone may wonder."""

    device: str
    """As torch spells it: "cpu", "cuda:0"."""
    backend: str
    """As `init_process_group` takes it: "gloo", "nccl", "cpu:gloo,cuda:nccl"."""
    explicit: bool = False
    """Was the backend asked for, by argument or by DDPILOT_BACKEND?"""
    why: str = ""
    """One sentence, non-empty where the choice differs from the obvious one; becomes a warning on local rank 0."""


def resolve_device(facts: DeviceFacts, backend: str | None = None) -> DeviceChoice:
    """Decide device and backend from `facts`; `backend` is what was asked for, None for the default.

    The device is number `local_rank` of those that this process sees, counted round: with one visible device that is
    device 0, whether the scheduler shows every rank its own or all ranks share it. Which of the two it is, only the
    devices' identities tell: see `share_devices`. Raises GroupError where a backend is missing.
    """
    _require(facts, backend)
    kind, native = facts.accelerator, facts.accelerator_backend
    if kind is None or facts.count == 0:
        if backend is not None and native is not None and backend == native:
            raise GroupError(
                _DID,
                found=f"backend {backend!r} was asked for and this process sees no {kind} device",
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


def share_devices(choice: DeviceChoice, sharing: Mapping[str, tuple[int, ...]]) -> DeviceChoice:
    """The choice once every rank's device is known; `sharing`: device identity -> the ranks on it, where several.

    NCCL refuses two ranks on one device: the default becomes gloo, an explicit backend with nccl is a GroupError.
    Every rank calls this with the same `sharing`, so all of them decide alike.
    """
    if not sharing or "nccl" not in choice.backend:
        return choice
    named = "; ".join(f"ranks {', '.join(map(str, ranks))} on {device}" for device, ranks in sharing.items())
    if choice.explicit:
        raise GroupError(
            _DID,
            found=f"backend {choice.backend!r} needs one GPU per rank, but several ranks share one: {named}",
            fix="Start at most as many ranks as there are GPUs, or use backend='gloo'.",
        )
    return replace(choice, backend="gloo", why=f"Several ranks share a GPU ({named}): gloo is used instead of nccl")


def detect_device_facts(environ: Mapping[str, str], local_rank: int) -> DeviceFacts:
    """Look at this build of torch and this machine. Creates no device context."""
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
    """Make the chosen device the current one of this process and return it. To be called before any tensor exists."""
    device = torch.device(choice.device)
    # Some accelerators have one device at most, and no function to choose it (mps).
    if device.type != "cpu" and (choose := getattr(torch.get_device_module(device), "set_device", None)) is not None:
        choose(device.index)
    return device


def device_identity(device: torch.device) -> str:
    """A name that two ranks of a host have in common exactly where they share the device; "" where that is unknown."""
    if device.type == "cpu":
        return ""
    describe = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if describe is None else getattr(describe(device), "uuid", None)
    return "" if uuid is None else f"{device.type} device {uuid}"


def _accelerator_of_build() -> str | None:
    # Not asked of torch.accelerator, which in torch 2.6 initialises the driver and fails where there is no device.
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
        fix="Install a build that has it, or pass a backend from this list." if facts.backends else "Install another.",
    )
