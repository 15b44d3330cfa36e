# SPDX-License-Identifier: Apache-2.0
"""The first ten random faults of benchmarks/random_faults.py, two of each kind; the soak runs all 200."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

import ddpilot
from benchmarks.leftovers import MARK
from benchmarks.random_faults import KINDS, LIMIT_S, Fault, check_report, draw_faults, inject

FAULTS = draw_faults(200)
FEW = 2 * len(KINDS)
NUM_FAULTS = len(FAULTS) if os.environ.get("DDPILOT_SOAK") == "1" else FEW


def error_of_rank(rank: int) -> ddpilot.RankError:
    """A report as the launcher would make it of a rank that raised."""
    error = ddpilot.RankError("running `train` on 4 ranks", found="it raised", rank=rank, host="here")
    error.__cause__ = ValueError("bad sample at step 3")
    return error


@pytest.mark.soak
@pytest.mark.timeout(100)
@pytest.mark.parametrize("number", range(NUM_FAULTS))
def test_launch_reports_a_random_fault_in_time_with_rank_and_cause_and_leaves_no_orphan(number: int) -> None:
    """4 ranks train a DDP model; one is killed, stopped and killed, raises or exits, or their parent is killed."""
    outcome = inject(FAULTS[number], os.environ[MARK])
    assert not outcome.wrong, f"{FAULTS[number]}: {outcome.wrong}"
    assert 0 <= outcome.reported_s <= LIMIT_S


def test_draw_faults_covers_every_kind_and_rank_and_is_the_same_each_time() -> None:
    """Those that every run makes hold each kind and rank, and a failure can be repeated."""
    few = draw_faults(FEW)
    assert few == FAULTS[:FEW]
    assert {fault.kind for fault in few} == set(KINDS)
    assert {fault.rank for fault in few} == {0, 1, 2, 3}


def test_check_report_refuses_a_wrong_report() -> None:
    """The judge of the faults sees a wrong type, rank and cause, and accepts a right report."""
    fault = Fault(kind="raise", rank=2, step=3, delay_s=0.0, exitcode=0)
    assert check_report(error_of_rank(2), fault) == []
    assert "RankError expected, got NoneType" in check_report(None, fault)[0]
    assert "rank 1 was blamed" in check_report(error_of_rank(1), fault)[0]
    assert "is not chained" in check_report(error_of_rank(2), replace(fault, step=4))[0]
    assert "SIGKILL is not named" in check_report(error_of_rank(2), replace(fault, kind="kill"))[0]
    assert "exit code 3 is not named" in check_report(error_of_rank(2), replace(fault, kind="exit", exitcode=3))[0]
