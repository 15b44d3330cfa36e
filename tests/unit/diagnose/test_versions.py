# SPDX-License-Identifier: Apache-2.0
"""Versions of the ranks: equal, and fitting the driver and the devices."""

from __future__ import annotations

from typing import Any

import pytest

from ddpilot.diagnose.checks import versions
from ddpilot.environments.nvml import NvmlDevices
from tests.unit.diagnose.checking import make_facts, make_report, statuses, text_of

GOOD = {
    "python": "3.11.7",
    "torch": "2.13.0",
    "cuda": "13.0",
    "nccl": "2.28",
    "driver": "580.65.06",
    "devices": [{"name": "H100", "capability": "9.0"}],
    "arch_list": ["sm_80", "sm_90"],
}


def test_versions_are_shown_and_have_to_be_equal() -> None:
    """A different torch on one rank is named, with the ranks."""
    equal = make_facts(ranks=(make_report(0, versions=GOOD), make_report(1, versions=GOOD)))
    assert text_of(versions.versions, equal) == "python 3.11.7, torch 2.13.0, cuda 13.0, nccl 2.28, driver 580.65.06"
    other = make_facts(ranks=(make_report(0, versions=GOOD), make_report(1, versions={**GOOD, "torch": "2.12.0"})))
    assert statuses(versions.versions, other) == ["warning DDP802"]
    assert "torch: 2.13.0 on rank 0; 2.12.0 on rank 1" in text_of(versions.versions, other)
    assert "torch was not asked" in text_of(versions.versions, make_facts())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ["ok"]),
        ({"cuda": "12.8", "driver": "525.60"}, ["ok"]),
        ({"driver": "550.54.14"}, ["error DDP802"]),
        ({"cuda": "12.8", "driver": "470.82"}, ["error DDP802"]),
        ({"devices": [{"name": "B200", "capability": "10.0"}]}, ["error DDP802"]),
        ({"devices": [{"name": "V100", "capability": "7.0"}]}, ["error DDP802"]),
        ({"devices": [{"name": "B200", "capability": "10.0"}], "arch_list": ["sm_90", "compute_90"]}, ["ok"]),
        ({"devices": [{"name": "L40", "capability": "8.9"}]}, ["ok"]),
        ({"cuda": None, "driver": None, "devices": []}, []),
    ],
)
def test_driver_has_to_fit_cuda_and_torch_the_devices(given: dict[str, Any], wanted: list[str]) -> None:
    """NVIDIA's table of drivers; the same major version, or PTX of an older one."""
    facts = make_facts(ranks=(make_report(0, versions={**GOOD, **given}),))
    assert statuses(versions.driver, facts) == wanted


def test_driver_misses_a_build_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build of torch on a machine with devices."""
    monkeypatch.setattr(versions, "read_nvml", lambda: NvmlDevices(("GPU-1",)))
    facts = make_facts(ranks=(make_report(0),))
    assert statuses(versions.driver, facts) == ["warning DDP802"]
    assert "1 NVIDIA devices, and torch 2.13.0+cpu has no CUDA" in text_of(versions.driver, facts)
