# SPDX-License-Identifier: Apache-2.0
"""What each rung is judged by, on records written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddpilot.diagnose.diagnosis import Line
from ddpilot.diagnose.ladder.checklist import POINTS, Evidence, make_checklist
from ddpilot.diagnose.ladder.failures import explain_failure, find_line
from ddpilot.diagnose.ladder.result import SECTIONS
from ddpilot.diagnose.ladder.rungs import (
    judge_alone,
    judge_communication,
    judge_first_batch,
    judge_group,
    judge_machine,
)
from ddpilot.diagnose.ladder.sources import Sources
from ddpilot.diagnose.updates.record import RankRecord, RecordSpec, program_path, updates_path
from ddpilot.diagnose.verify.target import Run
from ddpilot.errors import LaunchError, RankError
from ddpilot.findings.catalog import find_entry, make_finding

SITE = {"file": "train.py", "line": 9, "text": "loss = model(x)"}


def make_run(
    folder: Path,
    programs: Sequence[Mapping[str, Any]],
    durations: Sequence[float] = (),
    losses: Sequence[float] = (),
    error: Any = None,
) -> Run:
    """A run whose ranks have recorded these facts, and an update for each of `durations`."""
    for rank, facts in enumerate(programs):
        program_path(folder, rank).write_text(json.dumps({"rank": rank, "world_size": len(programs), **facts}))
        lines = [
            {"optimizer": 0, "number": number, "site": SITE, "losses": losses[number : number + 1], "batches": []}
            | {"inputs": [], "options": [], "duration_s": duration, "generators": {"torch": rank}}
            for number, duration in enumerate(durations)
        ]
        updates_path(folder, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    ranks = tuple(RankRecord(folder, rank) for rank in range(len(programs)))
    return Run(nproc_per_node=len(programs), spec=RecordSpec(num_updates=2), ranks=ranks, error=error)


def misplaced(kind: str, name: str, device: str) -> dict[str, Any]:
    """A tensor on `device`."""
    return {"kind": kind, "name": f"{kind} `{name}`", "device": device, "site": SITE}


def test_one_process_is_ok_with_the_losses_of_its_updates(tmp_path: Path) -> None:
    """The first and the last."""
    rung = judge_alone(make_run(tmp_path, [{"device": "cpu"}], (0.0, 0.1), (2.0, 1.5)))
    assert (rung.status, rung.evidence) == ("ok", "2 updates on cpu; loss 2 to 1.5")


def test_one_process_that_failed_has_its_error_and_line(tmp_path: Path) -> None:
    """The innermost line of the user, not of the library that raised."""
    text = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 4, in main\n    step(x)\n'
        f'  File "{json.__file__}", line 10, in loads\n    raise ValueError\n'
    )
    error = RankError("running", found="rank 0 raised ValueError: no", rank=0, host="h", rank_traceback=text)
    rung = judge_alone(make_run(tmp_path, [{}], error=error))
    (finding,) = rung.findings
    assert (rung.status, finding.code) == ("wrong", "DDP830")
    assert str(finding.place) == "train.py:4  step(x)"
    assert find_line("no traceback") is None


def test_a_failure_that_is_known_has_its_page(tmp_path: Path) -> None:
    """By the text of the error."""
    symptom = find_entry("DDP412").symptoms[1]
    error = LaunchError("running", found=symptom, fix="Move it")
    (finding,) = explain_failure(make_run(tmp_path, [{}], error=error))
    assert finding.code == "DDP412"


def test_machine_and_group_stop_at_errors_only() -> None:
    """Warnings are listed by code; each takes its own lines."""
    warning, error = make_finding("DDP804"), make_finding("DDP104", summary="no such host")
    lines = [
        Line("topology", "environment", "alone"),
        Line("versions", "versions", "torch 2"),
        Line("threads", "live", warning),
        Line("joined", "live", "2 ranks joined"),
    ]
    assert judge_machine(lines).evidence == "alone; torch 2"
    assert judge_group(lines).evidence == "2 ranks joined; warnings: DDP804"
    rung = judge_machine([*lines, Line("master_address", "network", error)])
    assert (rung.status, rung.evidence, rung.findings) == ("wrong", "no such host", (error,))
    assert judge_group([*lines, Line("master_address", "network", error)]).status == "ok"


def test_a_first_batch_counts_tensors_by_kind_in_one_order(tmp_path: Path) -> None:
    """Whatever came first."""
    facts = {"device": "cpu", "num_placed": {"target": 1, "buffer": 1, "parameter": 2, "loss weight": 1}}
    rung = judge_first_batch(make_run(tmp_path, [facts, facts], (0.0,)))
    assert rung.evidence == "2 parameters, 1 buffer, 1 target, 1 loss weight: on cpu"


@pytest.mark.parametrize(
    ("tensor", "durations", "code"),
    [
        (misplaced("buffer", "model.mask", "cuda:0"), (0.0,), "DDP118"),
        (misplaced("buffer", "model.mask", "cpu"), (0.0,), "DDP412"),
        (misplaced("input", "x", "cuda:0"), (0.0,), "DDP118"),
        (misplaced("input", "x", "cpu"), (), "DDP412"),
        (misplaced("input", "x", "cpu"), (0.0,), ""),
    ],
)
def test_a_tensor_on_another_device_is_named(
    tmp_path: Path, tensor: Mapping[str, Any], durations: tuple[float, ...], code: str
) -> None:
    """Inputs on the CPU of a program that made its update were moved later."""
    placed = {"num_placed": {"parameter": 1}}
    programs: list[dict[str, Any]] = [
        {"device": "cuda:0", **placed},
        {"device": "cuda:1", "misplaced": [tensor], **placed},
    ]
    rung = judge_first_batch(make_run(tmp_path, programs, durations))
    assert [each.code for each in rung.findings] == ([code] if code else [])
    for finding in rung.findings:
        assert finding.ranks == (1,)
        assert finding.evidence == (f"{tensor['name']} is on {tensor['device']} in rank 1, where cuda:1 computes",)
        assert finding.place is not None
        assert finding.place.line == 9


@pytest.mark.parametrize(
    ("waits", "durations", "status"),
    [((0.3, 0.3), (0.0, 0.4), "wrong"), ((0.3, 0.02), (0.0, 0.4), "ok"), ((0.03, 0.03), (0.0, 0.04), "ok")],
)
def test_communication_is_judged_by_the_rank_that_waits_least(
    tmp_path: Path, waits: tuple[float, float], durations: tuple[float, float], status: str
) -> None:
    """Over half of an update, and long enough to be no accident."""
    times = [
        {"communication": {"backward_comm_time": wait + 0.1, "backward_compute_comm_overlap_time": 0.1}}
        for wait in waits
    ]
    rung = judge_communication(make_run(tmp_path, times, durations), ())
    assert rung.status == status
    share = min(waits) / durations[1]
    assert rung.evidence.startswith(f"{share:.0%} of an update: {min(waits) * 1000:.1f} ms after the backward pass")


def test_communication_without_ddp_is_not_measured(tmp_path: Path) -> None:
    """Nothing failed."""
    rung = judge_communication(make_run(tmp_path, [{}, {}], (0.0, 0.1)), ())
    assert (rung.status, rung.evidence[:12]) == ("ok", "not measured")


def test_a_checklist_without_runs_and_text_has_seen_nothing() -> None:
    """Every section of the issue has points, in order."""
    items = make_checklist(Evidence(sources=Sources(), rungs=(), run=None))
    assert {item.status for item in items} == {"not seen"}
    assert tuple(dict.fromkeys(item.section for item in items)) == SECTIONS


def test_a_finding_belongs_to_one_point_of_the_checklist() -> None:
    """No code twice; each has a page."""
    codes = [code for point in POINTS for code in point.codes]
    assert len(codes) == len(set(codes))
    assert all(find_entry(code) for code in codes)


def test_files_that_several_ranks_wrote_are_wrong(tmp_path: Path) -> None:
    """With the line, as are names with a wrapper's prefix."""
    saved = [{"path": "/data/a.pt", "site": SITE, "has_prefix": True}]
    run = make_run(tmp_path, [{"saved": saved}, {"saved": saved}], (0.0,))
    items = make_checklist(Evidence(sources=Sources(), rungs=(), run=run))
    wrong = {item.name: (item.code, item.place and item.place.line) for item in items if item.status == "wrong"}
    assert wrong == {"one rank writes a file": ("DDP603", 9), "names without a prefix": ("DDP602", 9)}


def test_a_record_keeps_what_a_rank_wrote(tmp_path: Path) -> None:
    """Also where a rank wrote nothing."""
    run = make_run(tmp_path, [{"misplaced": [misplaced("buffer", "a", "cpu")]}])
    assert asdict(run.ranks[0].program)["misplaced"][0]["name"] == "buffer `a`"
    assert RankRecord(tmp_path, 5).program.misplaced == ()
