# SPDX-License-Identifier: Apache-2.0
"""NVIDIA devices through a fake of NVML at its edge: healthy ones pass, and each fault is found."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ddpilot.diagnose.checks import devices
from ddpilot.diagnose.gpus import read_gpu_states
from ddpilot.diagnose.reachability import find_link
from tests.unit.diagnose.checking import make_facts, make_report, statuses, text_of

NOT_SUPPORTED = 3
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "total": 85_520_809_984,
    "used": 1_000_000,
    "ComputeMode": 0,
    "mig": 0,
    "TotalEccErrors": 0,
    "CurrentClocksThrottleReasons": 0x1,
    "links": 18,
    "NvLinkVersion": 6,
    "MaxPcieLinkGeneration": 5,
    "CurrPcieLinkWidth": 16,
    "processes": {},
    "p2p": {},
}
"""What NVML reports of an idle H100 with NVSwitch."""
RTX = {**H100, "name": "NVIDIA GeForce RTX 3090", "links": 0, "MaxPcieLinkGeneration": 4, "TotalEccErrors": None}


class Nvml:
    """NVIDIA's library: fills what it is given pointers to, and returns 0 or an error number."""

    def __init__(self, *given: dict[str, Any]) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        if name in ("nvmlInit_v2", "nvmlShutdown"):
            return lambda: 0
        if name.startswith("nvmlDeviceGet"):
            key = name.removeprefix("nvmlDeviceGet")
            return lambda device, *arguments: self._number(self._of(device).get(key), arguments[-1])
        raise AttributeError(name)

    def _of(self, device: Any) -> dict[str, Any]:
        return self.given[(device.value or 0) - 1]

    def _number(self, value: int | None, target: Any) -> int:
        if value is None:
            return NOT_SUPPORTED
        target._obj.value = value
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802 - NVML's name, as below
        return self._number(len(self.given), count)

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:  # noqa: N802
        return self._number(index + 1, handle)

    def nvmlDeviceGetName(self, device: Any, text: Any, length: Any) -> int:  # noqa: N802
        text.value = self._of(device)["name"].encode()
        return 0

    def nvmlDeviceGetUUID(self, device: Any, text: Any, length: Any) -> int:  # noqa: N802
        text.value = f"GPU-{device.value}".encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:  # noqa: N802
        memory._obj.total, memory._obj.used = self._of(device)["total"], self._of(device)["used"]
        return 0

    def nvmlDeviceGetMigMode(self, device: Any, current: Any, pending: Any) -> int:  # noqa: N802
        return self._number(self._of(device)["mig"], current)

    def nvmlDeviceGetUtilizationRates(self, device: Any, rates: Any) -> int:  # noqa: N802
        return NOT_SUPPORTED

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, infos: Any) -> int:  # noqa: N802
        processes = self._of(device)["processes"]
        for info, (pid, num_bytes) in zip(infos, processes.items(), strict=False):
            info.pid, info.memory_bytes = pid, num_bytes
        return self._number(len(processes), count)

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int, is_active: Any) -> int:  # noqa: N802
        return self._number(1 if link < self._of(device)["links"] else None, is_active)

    def nvmlDeviceGetP2PStatus(self, device: Any, other: Any, index: int, status: Any) -> int:  # noqa: N802
        return self._number(self._of(device)["p2p"].get(other.value, 0), status)


ALL = (devices.devices, devices.compute_mode, devices.memory_in_use, devices.health, devices.peer_access)


def test_healthy_devices_pass() -> None:
    """Two idle H100s, with what each check has found."""
    facts = make_facts(nvml=Nvml(H100, H100))
    assert [statuses(check, facts) for check in ALL] == [["ok"]] * len(ALL)
    assert text_of(devices.devices, facts) == "2 x NVIDIA H100 80GB HBM3 (85.5 GB)"
    assert "2 devices with 18 NVLinks" in text_of(devices.peer_access, facts)


def test_a_machine_without_a_driver_has_nothing_to_check() -> None:
    """One line says so; the other checks have none."""
    assert [text_of(check, make_facts()) for check in ALL] == ["no NVIDIA device", "", "", "", ""]


@pytest.mark.parametrize(
    ("check", "fault", "status", "said"),
    [
        (
            devices.compute_mode,
            {"ComputeMode": 2},
            "error DDP803",
            "device 1 (NVIDIA H100 80GB HBM3) is in compute mode",
        ),
        (
            devices.compute_mode,
            {"ComputeMode": 3, "processes": {7: 8}},
            "error DDP803",
            "EXCLUSIVE_PROCESS, with 1 process",
        ),
        (devices.compute_mode, {"mig": 1}, "warning DDP803", "is split by MIG"),
        (devices.health, {"TotalEccErrors": 4}, "warning DDP803", "4 uncorrected memory errors"),
        (devices.health, {"CurrentClocksThrottleReasons": 0x41}, "warning DDP803", "too hot (hardware)"),
        (devices.health, {"CurrentClocksThrottleReasons": 0x80}, "warning DDP803", "power brake"),
        (
            devices.peer_access,
            {"p2p": {1: 1}},
            "warning DDP108",
            "1 of 2 pairs of devices have no peer-to-peer access: 1->0",
        ),
    ],
)
def test_each_fault_of_a_device_is_found(check: Any, fault: dict[str, Any], status: str, said: str) -> None:
    """On the second of two devices, by its number and name."""
    facts = make_facts(nvml=Nvml(H100, {**H100, **fault}))
    assert status in statuses(check, facts)
    assert said in text_of(check, facts)


def test_memory_in_use_names_the_processes_and_not_this_one() -> None:
    """Pid, user, command and memory; a pid of another container cannot be named."""
    busy = {
        **H100,
        "used": 9_000_000_000,
        "processes": {os.getppid(): 8_000_000_000, os.getpid(): 5, 2**22 + 1: 2**64 - 1},
    }
    facts = make_facts(nvml=Nvml(H100, busy))
    assert statuses(devices.memory_in_use, facts) == ["warning DDP803"]
    found = text_of(devices.memory_in_use, facts)
    assert "device 1 (NVIDIA H100 80GB HBM3): 9.0 GB of 85.5 GB are in use" in found
    assert f"pid {os.getppid()} of " in found
    assert f"pid {2**22 + 1} of another container or user, unknown memory" in found
    assert f"pid {os.getpid()} " not in found


def test_peer_access_has_the_matrix() -> None:
    """Cards without NVLink, one of which is behind a chipset that does not forward."""
    facts = make_facts(nvml=Nvml({**RTX, "p2p": {2: 1}}, {**RTX, "p2p": {1: 5}}))
    found = text_of(devices.peer_access, facts).splitlines()
    assert found[1:4] == ["2 devices with PCIe", "-             chipset", "not supported -"]


def test_an_old_driver_reports_less() -> None:
    """Functions that a driver does not have leave values open, and nothing fails."""

    class Old(Nvml):
        nvmlDeviceGetP2PStatus = None  # type: ignore[assignment]  # noqa: N815
        nvmlDeviceGetMemoryInfo = None  # type: ignore[assignment]  # noqa: N815

    (first, _) = read_gpu_states(Old(H100, H100))
    assert (first.total_bytes, first.peers) == (None, ("", "unknown"))
    assert statuses(devices.peer_access, make_facts(nvml=Old(H100, H100))) == ["warning DDP108"]


def test_find_link_is_nvlink_or_pcie_or_loopback() -> None:
    """Bytes per second in one direction: 18 links of 25 GB/s, 16 lanes of PCIe 4."""
    nvml = Nvml(H100, RTX)
    assert find_link("GPU-1", 1, nvml) == ("NVLink (18 links)", 450e9)
    kind, rate = find_link("2", 1, nvml)
    assert kind == "PCIe"
    assert rate == pytest.approx(31.5e9, rel=0.01)
    assert find_link("9", 1, nvml) == ("an unknown link", None)
    assert find_link("", 1, nvml) == ("loopback", None)


def test_one_device_per_rank_names_ranks_that_share_one() -> None:
    """The same location on another host is another device."""
    apart = tuple(make_report(rank, identity=f"cuda device {rank}") for rank in range(2))
    hosts = tuple(make_report(rank, identity="cuda device 0", host=str(rank)) for rank in range(2))
    both = tuple(make_report(rank, identity="cuda device 0") for rank in range(2))
    assert statuses(devices.one_device_per_rank, make_facts(ranks=apart)) == ["ok"]
    assert statuses(devices.one_device_per_rank, make_facts(ranks=hosts)) == ["ok"]
    assert statuses(devices.one_device_per_rank, make_facts(ranks=both)) == ["warning DDP118"]
    assert "ranks 0,1 of a share cuda device 0" in text_of(devices.one_device_per_rank, make_facts(ranks=both))
    assert statuses(devices.one_device_per_rank, make_facts(ranks=(make_report(0),))) == []
