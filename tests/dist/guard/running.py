# SPDX-License-Identifier: Apache-2.0
"""Run programs on ranks under guard's probes, and feed their notes to the rules."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddpilot
from ddpilot.findings.finding import Finding
from ddpilot.guard.hook import install
from ddpilot.guard.rules.registry import RuleRunner
from ddpilot.module_names import GUARD_PROBES
from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.journal import Entry, read_journal
from ddpilot.watch.report import ReportHistory
from tests.preload import PRELOAD

NUM_RANKS = 2
Program = Callable[[Path], None]


def run_all(folder: Path, programs: Sequence[Program]) -> dict[str, list[Finding]]:
    """The findings on each of `programs`, by name; each begins with a guard of its own, in one launch."""
    launcher = ddpilot.Launcher(nproc_per_node=NUM_RANKS, timeout_s=100, preload=PRELOAD, watch=False)
    launcher.run(_run_on_rank, folder, list(programs))
    return {program.__name__: judge(folder, program.__name__) for program in programs}


def judge(folder: Path, name: str) -> list[Finding]:
    """What the rules say of the journals of a program. They are off after an error, which the test is told."""
    entries = {rank: read_entries(folder, name, rank) for rank in range(NUM_RANKS)}
    book = RuleRunner(NUM_RANKS, log=lambda rank: read_ring(_path(folder, name, rank, "ring")))
    now_ns = time.monotonic_ns()
    findings = [*book.feed(entries, now_ns), *book.finish(now_ns)]
    assert book.faults == []
    return ReportHistory(30.0).new_findings(findings)


def read_entries(folder: Path, name: str, rank: int) -> tuple[Entry, ...]:
    """What guard noted of a program on one rank, all of it."""
    journal = read_journal(_path(folder, name, rank, "journal"))
    assert journal.num_lost == 0
    faults = [entry.values for entry in journal.entries if entry.kind == "fault"]
    assert faults == []
    return journal.entries


def _path(folder: Path, name: str, rank: int, kind: str) -> Path:
    return folder / f"{name}-{rank}.{kind}"


def _run_on_rank(folder: Path, programs: list[Program]) -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    for number, program in enumerate(programs):
        torch.manual_seed(1000 * number + rank)
        stop = install(_path(folder, program.__name__, rank, "journal"), rank=rank, probes=GUARD_PROBES)
        with start_recording(_path(folder, program.__name__, rank, "ring"), rank=rank):
            program(folder)
        stop()
        dist.barrier()
    dist.destroy_process_group()


def codes(findings: Sequence[Any]) -> set[str]:
    """Codes of the findings of this part of guard."""
    return {finding.code for finding in findings}
