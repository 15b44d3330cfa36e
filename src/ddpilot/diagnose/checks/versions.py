# SPDX-License-Identifier: Apache-2.0
"""Check the versions that the ranks use: equal on all of them, and fitting each other."""

from __future__ import annotations

import sys
from typing import Any

from ddpilot.diagnose.agreement import check_code
from ddpilot.diagnose.combinations import parse_version
from ddpilot.diagnose.facts import Answers, Facts
from ddpilot.environments.nvml import read_nvml
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.text import render_ranks

_NAMES = ("python", "torch", "cuda", "hip", "nccl", "driver", "ddpilot")
_MIN_DRIVERS = {11: (450,), 12: (525,), 13: (580,)}
"""By CUDA's major version: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""


def versions(facts: Facts) -> Answers:
    """Versions of Python, torch, CUDA, NCCL, the driver and ddpilot, the same on all ranks."""
    if not facts.ranks:
        yield f"Python {sys.version.split()[0]}; torch was not asked, since no rank has reported"
        return
    different = False
    for name in _NAMES:
        ranks: dict[str, list[int]] = {}
        for report in facts.ranks:
            ranks.setdefault(str(report.versions.get(name)), []).append(report.rank)
        if len(ranks) > 1:
            different = True
            found = "; ".join(f"{value} on {render_ranks(which)}" for value, which in ranks.items())
            fix = f"Install the same {name} on every node"
            yield make_finding("DDP802", summary=f"ranks have different versions of {name}: {found}", fix=fix)
    if not different:
        known = facts.ranks[0].versions
        yield ", ".join(f"{name} {known[name]}" for name in _NAMES if known.get(name))


def code(facts: Facts) -> Answers:
    """The script and the Python files next to it, the same on all ranks."""
    return check_code(facts.ranks)


def driver(facts: Facts) -> Answers:
    """The driver is new enough for CUDA, and this build of torch has code for the devices."""
    for report in facts.ranks[:1]:
        cuda, found = report.versions.get("cuda"), report.versions.get("driver")
        if cuda and found and parse_version(found) < _MIN_DRIVERS.get(parse_version(cuda)[0], ()):
            least = _MIN_DRIVERS[parse_version(cuda)[0]][0]
            fix = f"Install driver {least} or newer, or a build of torch for an older CUDA"
            summary = f"torch is built for CUDA {cuda}, which needs driver {least} or newer, and this one is {found}"
            yield make_finding("DDP802", summary=summary, fix=fix, severity="error")
        elif not cuda and not report.versions.get("hip") and (devices := read_nvml()) and devices.uuids:
            summary = f"{len(devices.uuids)} NVIDIA devices, and torch {report.versions['torch']} has no CUDA"
            yield make_finding("DDP802", summary=summary, fix="Install a build of torch with CUDA")
        elif unfit := _unfit_devices(report.versions):
            summary = f"torch {report.versions['torch']} is not compiled for {', '.join(unfit)}"
            fix = "Install a build of torch for a newer CUDA"
            yield make_finding("DDP802", summary=summary, fix=fix, severity="error")
        elif cuda and found:
            yield f"driver {found} runs CUDA {cuda}, and torch has code for each device"


def _unfit_devices(versions: dict[str, Any]) -> list[str]:
    """Devices that none of the architectures torch is compiled for can run: same major version, or PTX of an older."""
    compiled = [str(arch) for arch in versions.get("arch_list") or ()]
    unfit = []
    for device in versions.get("devices") or ():
        capability = parse_version(str(device.get("capability") or ""))
        if compiled and capability and not any(_runs(arch, capability) for arch in compiled):
            unfit.append(f"{device['name']} (sm_{capability[0]}{capability[1]})")
    return unfit


def _runs(arch: str, capability: tuple[int, ...]) -> bool:
    kind, _, digits = arch.partition("_")
    number = int("".join(filter(str.isdigit, digits)) or 0)
    major, minor = divmod(number, 10)
    return (major, minor) <= capability and (kind == "compute" or major == capability[0])
