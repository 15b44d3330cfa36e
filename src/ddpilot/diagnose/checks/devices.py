# SPDX-License-Identifier: Apache-2.0
"""Check NVIDIA devices: one per rank, free, healthy, and able to read each other's memory."""

from __future__ import annotations

import os
from collections import Counter

import psutil

from ddpilot.diagnose.facts import Answers, Facts, in_units
from ddpilot.diagnose.gpus import MODES, GpuState, read_gpu_states
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.text import render_ranks

_PROHIBITED = 2
_EXCLUSIVE = (1, 3)


def devices(facts: Facts) -> Answers:
    """The devices of this machine."""
    states = read_gpu_states(facts.nvml)
    counts = Counter(f"{state.name} ({in_units(state.total_bytes or 0)})" for state in states)
    yield ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no NVIDIA device"


def one_device_per_rank(facts: Facts) -> Answers:
    """No two ranks of a host are on the same device, by its PCI location or UUID."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for report in facts.ranks:
        if report.identity:
            ranks.setdefault((report.host, report.identity), []).append(report.rank)
    shared = {place: which for place, which in ranks.items() if len(which) > 1}
    for (host, identity), which in shared.items():
        summary = f"{render_ranks(which)} of {host} share {identity}, and exchange data over gloo"
        yield make_finding("DDP118", summary=summary, ranks=which)
    if ranks and not shared:
        yield f"{sum(map(len, ranks.values()))} ranks on {len(ranks)} devices"


def compute_mode(facts: Facts) -> Answers:
    """Every device accepts the processes of this job, and none is split by MIG."""
    modes: Counter[str] = Counter()
    for index, state in enumerate(read_gpu_states(facts.nvml)):
        name = f"device {index} ({state.name})"
        mode = MODES.get(state.compute_mode or 0, "unknown")
        modes[mode] += 1
        if state.compute_mode == _PROHIBITED or (state.compute_mode in _EXCLUSIVE and state.processes):
            summary = f"{name} is in compute mode {mode}" + (
                f", with {len(state.processes)} process(es) on it" * bool(state.processes)
            )
            fix = f"`sudo nvidia-smi -i {index} -c DEFAULT`, or hide it (CUDA_VISIBLE_DEVICES)"
            yield make_finding("DDP803", summary=summary, fix=fix, severity="error")
        if state.is_split:
            summary = f"{name} is split by MIG: each process sees one slice, and NCCL accepts one rank per GPU"
            yield make_finding(
                "DDP803", summary=summary, fix=f"`sudo nvidia-smi -i {index} -mig 0`, or one rank per GPU"
            )
    if modes:
        yield ", ".join(f"{count} in mode {mode}" for mode, count in modes.items())


def memory_in_use(facts: Facts) -> Answers:
    """Processes that hold memory of a device: whose they are, and whether they are ranks without a launcher."""
    states = read_gpu_states(facts.nvml)
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    is_used = False
    for index, state in enumerate(states):
        users = [
            f"{_describe(pid)}, {'unknown memory' if used is None else in_units(used)}"
            for pid, used in state.processes.items()
            if pid not in own
        ]
        is_used = is_used or bool(users)
        if users:
            used_bytes = in_units(state.used_bytes or 0)
            summary = f"device {index} ({state.name}): {used_bytes} of {in_units(state.total_bytes or 0)} are in use"
            yield make_finding("DDP803", summary=summary, evidence=users)
    if states and not is_used:
        yield "no other process holds memory of a device"


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        command = " ".join(" ".join(process.cmdline()).split())[:80] or process.name()
        note = ", without a parent" if process.ppid() == 1 else ""
        return f"pid {pid} of {process.username()}{note}: {command}"
    except psutil.Error:
        return f"pid {pid} of another container or user"


def health(facts: Facts) -> Answers:
    """Uncorrected memory errors, and clocks that a fault slows."""
    states = read_gpu_states(facts.nvml)
    faults = [(index, state, fault) for index, state in enumerate(states) for fault in _faults(state)]
    for index, state, fault in faults:
        yield make_finding("DDP803", summary=f"device {index} ({state.name}): {fault}", fix=_LOOK)
    if states and not faults:
        yield "no uncorrected memory error, no clock that a fault slows"


_LOOK = "`nvidia-smi -q -d ECC,PERFORMANCE,TEMPERATURE`; have the device reset or looked at"


def _faults(state: GpuState) -> list[str]:
    errors = [f"{state.ecc_errors} uncorrected memory errors"] if state.ecc_errors else []
    return errors + [f"its clocks are slowed: {reason}" for reason in state.throttles]


def peer_access(facts: Facts) -> Answers:
    """Which devices can read each other's memory, and over what."""
    states = read_gpu_states(facts.nvml)
    if len(states) < 2:
        return
    pairs = [(a, b, peer) for a, state in enumerate(states) for b, peer in enumerate(state.peers) if peer]
    broken = [(a, b, peer) for a, b, peer in pairs if peer != "ok"]
    links = Counter(f"{state.num_nvlinks} NVLinks" if state.num_nvlinks else "PCIe" for state in states)
    text = ", ".join(f"{count} devices with {kind}" for kind, count in links.items())
    if broken:
        matrix = [" ".join(f"{peer or '-':<13}" for peer in state.peers).rstrip() for state in states]
        few = ", ".join(f"{a}->{b} ({why})" for a, b, why in broken[:4])
        summary = f"{len(broken)} of {len(pairs)} pairs of devices have no peer-to-peer access: {few}"
        yield make_finding("DDP108", summary=summary, evidence=[text, *matrix], severity="warning", fix=_SLOWER)
    else:
        yield f"each device reads the memory of each other one; {text}"


_SLOWER = "NCCL copies through host memory instead; if it hangs, `export NCCL_P2P_DISABLE=1`"
