# SPDX-License-Identifier: Apache-2.0
"""Programs of the zoo on emulated accelerators: watch and guard find what they do over gloo.

Collectives return at once there. All run from one rank server, since that of a device takes 3 s to start.
"""

from __future__ import annotations

import pytest

from tests.accelerator import why_not
from tests.accelerator.on_device import call
from tests.soak import IS_SOAK, soak

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.timeout(400),
]

HANGS_AND_MISMATCHES = (
    *("early_stop_one_rank", "op_mismatch", "size_mismatch", "swallowed_exception"),
    *("uneven_inputs", "receive_without_send"),
)
"""`group_order` of the zoo is no hang here, where both groups' collectives are queued before anyone waits; in
`unused_on_one_rank` and `uneven_inputs_and_exit` a rank may come to its end before anything waits for the device."""
MORE_MISMATCHES = (
    *("dtype_mismatch", "reduce_op_mismatch", "root_mismatch", "unequal_batches_known", "groups_in_turn"),
    *("collective_under_rank_guard", "killed_rank"),
)
"""The rule that names the others names these, and no device has a part in a process that is killed; over gloo each
test of the zoo has them."""
PROVEN = ("one_computes", "root_needs_all")
WRONG_NUMBERS = ("bypass", "nan_read_late")
MORE_WRONG_NUMBERS = (
    *("no_sync_left_on", "step_on_one_rank", "never_wrapped", "frozen_after_wrap", "parameter_shape_differs"),
    *("two_forwards", "changed_after_wrap", "accumulation_synced", "nan_on_one_rank"),
)

RIGHT = ("plain_ddp", "several_groups", "root_goes_on", "receiver_computes", "accumulation")
MORE_RIGHT = (
    *("one_rank_is_late", "asynchronous", "gan", "loaded_on_all_ranks", "two_optimizers"),
    *("clipped_and_scaled", "closure_accumulation"),
)
NOT_SAID = ("link_is_slow", "ends_unread")


@pytest.fixture(scope="module")
def wrong() -> dict[str, list[str]]:
    """By program: what is not found as its script asks for, or what is found in a right one; empty if all is well."""
    cases = (*HANGS_AND_MISMATCHES, *PROVEN, *WRONG_NUMBERS, *((*MORE_MISMATCHES, *MORE_WRONG_NUMBERS) * IS_SOAK))
    found: dict[str, list[str]] = call(
        "tests.accelerator.zoo:judge_all", cases, (*RIGHT, *NOT_SAID, *(MORE_RIGHT * IS_SOAK)), limit_s=390
    )
    assert len(found) >= 17
    return found


def of(wrong: dict[str, list[str]], names: tuple[str, ...]) -> dict[str, list[str]]:
    """What is wrong with `names`, which have all run."""
    return {name: wrong[name] for name in names if wrong[name]}


def test_hangs_and_mismatches_are_named(wrong: dict[str, list[str]]) -> None:
    """Code, rank and line of each finding are those that the script says."""
    assert of(wrong, HANGS_AND_MISMATCHES + MORE_MISMATCHES * IS_SOAK) == {}


@soak
def test_hangs_and_mismatches_of_four_ranks_are_named() -> None:
    """The same among four ranks: the one that does not wait, or the one whose call differs."""
    names = HANGS_AND_MISMATCHES + MORE_MISMATCHES
    found = call("tests.accelerator.zoo:judge_all", names, (), 4, num_devices=4, limit_s=290)
    assert found == {name: [] for name in names}


def test_ranks_that_do_not_come_are_named_where_one_waits_for_them(wrong: dict[str, list[str]]) -> None:
    """By the line where it is now; also where the one that waits is the root of a broadcast, and then needs all."""
    assert of(wrong, PROVEN) == {}


def test_training_that_goes_wrong_is_named(wrong: dict[str, list[str]]) -> None:
    """By guard, which reads the device's numbers without waiting for them."""
    assert of(wrong, WRONG_NUMBERS + MORE_WRONG_NUMBERS * IS_SOAK) == {}


def test_right_programs_have_no_finding(wrong: dict[str, list[str]]) -> None:
    """Among them a root of a broadcast and a receiver that compute while the other rank is late."""
    assert of(wrong, RIGHT + MORE_RIGHT * IS_SOAK) == {}


def test_what_cannot_be_proven_is_not_said(wrong: dict[str, list[str]]) -> None:
    """A collective that all have begun and that takes long; one that nobody waits for, of a rank that has ended."""
    assert of(wrong, NOT_SAID) == {}
