# SPDX-License-Identifier: Apache-2.0
"""Device and backend decided from facts, with fake device counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ddpilot.errors import GroupError
from ddpilot.group.device import (
    DeviceChoice,
    DeviceFacts,
    backend_of,
    broadcast_tensors,
    is_asynchronous,
    name_nvidia,
    resolve_device,
    share_devices,
    use_device,
)
from ddpilot.group.protocol import FakeGroup

CPU = DeviceFacts(None, 0, local_rank=1)
CUDA = DeviceFacts("cuda", 4, local_rank=2, accelerator_backend="nccl", backends=frozenset({"gloo", "nccl"}))
XPU = DeviceFacts("xpu", 4, local_rank=2, accelerator_backend="xccl", backends=frozenset({"gloo", "xccl"}))
SHARED = {"cuda device X of host a": (0, 2)}


def test_resolve_device_takes_the_cpu_and_gloo_when_there_is_no_accelerator() -> None:
    """A CPU build and a machine without a visible device both end on the CPU."""
    assert resolve_device(CPU) == DeviceChoice("cpu", "gloo")
    assert resolve_device(replace(CUDA, count=0)) == DeviceChoice("cpu", "gloo")


def test_resolve_device_takes_the_local_ranks_gpu_and_both_backends() -> None:
    """CPU tensors and objects work with NCCL by default."""
    assert resolve_device(CUDA) == DeviceChoice("cuda:2", "cpu:gloo,cuda:nccl")


def test_resolve_device_takes_device_0_when_the_scheduler_shows_one() -> None:
    """Every rank that sees one device uses that, whatever its local rank."""
    assert resolve_device(replace(CUDA, count=1, local_rank=3)).device == "cuda:0"


def test_resolve_device_counts_round_when_there_are_more_ranks_than_devices() -> None:
    """Local rank 5 of a machine with 4 devices uses device 1."""
    assert resolve_device(replace(CUDA, local_rank=5)).device == "cuda:1"


@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl"])
def test_resolve_device_keeps_the_backend_that_was_asked_for(backend: str) -> None:
    """An explicit backend is taken as it is and remembered as explicit."""
    assert resolve_device(CUDA, backend) == DeviceChoice("cuda:2", backend, explicit=True)


def test_resolve_device_refuses_nccl_when_no_device_is_visible() -> None:
    """NCCL on a machine with hidden devices raises an error with the variable to check."""
    with pytest.raises(GroupError, match=r"'nccl' was requested, but no cuda device is visible.*VISIBLE_DEVICES"):
        resolve_device(replace(CUDA, count=0), "nccl")


def test_resolve_device_names_the_backends_when_the_one_asked_for_is_missing() -> None:
    """A backend that this build lacks is named, with those that it has."""
    with pytest.raises(GroupError, match="has no 'nccl' backend; it has: gloo"):
        resolve_device(CPU, "cpu:gloo,cuda:nccl")
    with pytest.raises(GroupError, match="has no 'gloo' backend; it has: none"):
        resolve_device(replace(CPU, backends=frozenset()))


def test_resolve_device_uses_gloo_on_the_gpu_when_the_build_has_no_nccl() -> None:
    """Windows has GPUs and no NCCL: gloo works there, and the reason is given."""
    choice = resolve_device(replace(CUDA, backends=frozenset({"gloo"})))
    assert (choice.device, choice.backend) == ("cuda:2", "gloo")
    assert choice.why == "This build of PyTorch has no nccl: this group uses gloo"


def test_resolve_device_uses_the_cpu_when_the_accelerator_has_no_collectives() -> None:
    """No backend supports mps: the group uses the CPU, and the reason is given."""
    choice = resolve_device(DeviceFacts("mps", 1, local_rank=0))
    assert (choice.device, choice.backend) == ("cpu", "gloo")
    assert "no collectives on mps" in choice.why


def test_resolve_device_works_without_gloo_when_the_accelerator_brings_its_own() -> None:
    """A build with nccl alone uses nccl alone."""
    assert resolve_device(replace(CUDA, backends=frozenset({"nccl"}))).backend == "nccl"


def test_share_devices_switches_to_gloo_when_ranks_share_a_device() -> None:
    """The default backend becomes gloo, and the sentence names ranks and device."""
    choice = share_devices(resolve_device(CUDA), SHARED)
    assert choice.backend == "gloo"
    assert "ranks 0, 2 on cuda device X of host a" in choice.why


def test_share_devices_refuses_an_explicit_nccl_when_ranks_share_a_device() -> None:
    """NCCL on a shared device would fail later and deeper; it is refused before anything starts."""
    with pytest.raises(GroupError, match="needs one GPU per rank, but several ranks share one: ranks 0, 2"):
        share_devices(resolve_device(CUDA, "nccl"), SHARED)


@pytest.mark.parametrize("sharing", [{}, SHARED])
def test_share_devices_changes_nothing_when_there_is_no_conflict(sharing: dict[str, tuple[int, ...]]) -> None:
    """Gloo does not mind sharing, and without sharing NCCL stays."""
    gloo = resolve_device(CUDA, "gloo")
    assert share_devices(gloo, sharing) == gloo
    assert share_devices(resolve_device(CUDA), {}) == resolve_device(CUDA)


def test_share_devices_refuses_where_gloo_does_not_take_the_device() -> None:
    """Of a device that gloo knows nothing of, ranks cannot share one: refused before anything starts."""
    with pytest.raises(GroupError, match=r"needs one GPU per rank.*Start at most as many ranks as there are devices"):
        share_devices(resolve_device(XPU), {"xpu device X of host a": (0, 2)})


@pytest.mark.parametrize(
    ("backends", "kind", "found"),
    [
        ("nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:NCCL", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "xpu", ""),
        ("gloo", "cuda", "gloo"),
    ],
)
def test_backend_of_finds_the_backend_of_a_kind_of_device(backends: str, kind: str, found: str) -> None:
    """One name is for all devices, a list is by device."""
    assert backend_of(backends, kind) == found


@pytest.mark.parametrize(
    ("backends", "device", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:1", True),
        ("nccl", "cuda:0", True),
        ("cpu:gloo,npu:hccl", "cpu", False),
        ("cpu:gloo,xpu:xccl", "xpu:0", True),
        ("gloo", "cuda:0", False),
        ("cpu:gloo", "cuda:0", False),
    ],
)
def test_is_asynchronous_is_true_of_backends_that_a_device_brings(backends: str, device: str, expected: bool) -> None:
    """Gloo is done when it returns, on whatever device; no backend for the device is not asynchronous."""
    assert is_asynchronous(backends, torch.device(device)) is expected


@pytest.mark.parametrize(
    ("place", "uuid", "model", "expected"),
    [
        ("00000000:3b:00", "u1", "NVIDIA A100", "cuda device 00000000:3b:00"),
        ("00000000:3b:00", "u2", "NVIDIA A100 MIG 1g.5gb", "cuda device 00000000:3b:00"),
        ("", "u1", "NVIDIA A100 MIG 1g.5gb", "cuda device of a GPU that is split by MIG"),
        ("", "u1", "NVIDIA A100", "cuda device u1"),
        ("", "", "NVIDIA A100", ""),
    ],
)
def test_name_nvidia_is_equal_for_slices_of_one_gpu(place: str, uuid: str, model: str, expected: str) -> None:
    """NCCL goes by the place on the PCI bus, and refuses two slices that MIG made of one GPU."""
    assert name_nvidia(place, uuid, model) == expected


def test_use_device_says_which_device_cannot_be_used_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML may report a GPU for which this build of PyTorch has no kernels, or with an old driver."""

    class Module:
        def set_device(self, index: int) -> None:
            raise RuntimeError(f"CUDA driver initialization failed for {index}\nmore")

    monkeypatch.setattr(torch, "get_device_module", lambda _: Module())
    with pytest.raises(GroupError, match=r"choosing cuda:1: PyTorch .* cannot use it: CUDA driver init.* for 1\. Inst"):
        use_device(DeviceChoice("cuda:1", "nccl"))


def test_broadcast_tensors_keeps_every_dtype_shape_and_memory_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bytes, also scalars, booleans, odd sizes, complex numbers and "channels last"; large tensors go alone."""
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    sent = [torch.tensor(True), torch.arange(3), image, torch.randn(2, dtype=torch.complex64), torch.ones(7 << 20)]
    flats: list[torch.Tensor] = []
    group: Any = FakeGroup(world_size=2)
    monkeypatch.setattr(FakeGroup, "broadcast", lambda self, flat, src=0: flats.append(flat.clone()))
    broadcast_tensors(iter(sent), group)
    assert [len(flat) for flat in flats] == [1 + 24 + 384 + 16, 28 << 20]
    left = flats[:]
    monkeypatch.setattr(FakeGroup, "broadcast", lambda self, flat, src=0: flat.copy_(left.pop(0)))
    received = [torch.zeros_like(one) for one in sent]
    broadcast_tensors(received, group)
    assert all(map(torch.equal, received, sent))
    assert received[2].is_contiguous(memory_format=torch.channels_last)
