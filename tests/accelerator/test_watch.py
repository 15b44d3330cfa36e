# SPDX-License-Identifier: Apache-2.0
"""Hangs and mismatches are named as over gloo, with collectives that return at once."""

from __future__ import annotations

import pytest

from tests.accelerator import why_not
from tests.accelerator.on_device import call
from tests.soak import soak

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

HANGS_AND_MISMATCHES = (
    *("collective_under_rank_guard", "dtype_mismatch", "early_stop_one_rank", "killed_rank", "op_mismatch"),
    *("reduce_op_mismatch", "root_mismatch", "size_mismatch", "swallowed_exception", "unequal_batches_known"),
    *("uneven_inputs", "groups_in_turn", "receive_without_send"),
)
"""`group_order` of the zoo is no hang here, where both groups' collectives are queued before anyone waits; in
`unused_on_one_rank` and `uneven_inputs_and_exit` a rank may come to its end before anything waits for the device."""
RIGHT = ("plain_ddp", "one_rank_is_late", "several_groups", "asynchronous", "gan", "root_goes_on", "receiver_computes")


@pytest.mark.timeout(400)
def test_hangs_and_mismatches_are_named() -> None:
    """Code, rank and line of each finding are those that the script says."""
    found = call("tests.accelerator.zoo:judge_cases", HANGS_AND_MISMATCHES, 2, limit_s=390)
    assert found == {name: [] for name in HANGS_AND_MISMATCHES}


@pytest.mark.timeout(300)
@soak
def test_hangs_and_mismatches_of_four_ranks_are_named() -> None:
    """The same among four ranks: the one that does not wait, or the one whose call differs."""
    found = call("tests.accelerator.zoo:judge_cases", HANGS_AND_MISMATCHES, 4, num_devices=4, limit_s=290)
    assert found == {name: [] for name in HANGS_AND_MISMATCHES}


@pytest.mark.timeout(300)
def test_right_programs_have_no_finding() -> None:
    """Among them a root of a broadcast and a receiver that compute while the other rank is late."""
    assert call("tests.accelerator.zoo:find_in_controls", RIGHT, limit_s=290) == {name: [] for name in RIGHT}
