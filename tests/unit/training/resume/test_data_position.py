# SPDX-License-Identifier: Apache-2.0
"""The data of a resumed run compared with the data of the saved one."""

from __future__ import annotations

import pytest

from ddpilot.errors import MismatchedCheckpointError
from ddpilot.training.resume.data_position import check_unchanged


def test_check_unchanged_names_what_differs() -> None:
    """Dataset length, batch size and seed with both values; unknown values are not compared."""
    before = {"seed": 1, "dataset_length": 100, "global_batch_size": 8}
    check_unchanged(before, dict(before), 9, 0, "")
    check_unchanged(before, {"dataset_length": None}, 9, 0, "")
    check_unchanged({}, {"dataset_length": 7}, 9, 0, "")
    with pytest.raises(MismatchedCheckpointError, match=r"`dataset_length` was 100, is 90 .*`seed` was 1, is 0"):
        check_unchanged(before, {"dataset_length": 90, "global_batch_size": 8, "seed": 0}, 9, 0, "")
    with pytest.raises(MismatchedCheckpointError, match=r"^resuming ckpt/x at step 9: shuffle, drop_last") as caught:
        check_unchanged({"batches": "a1b2"}, {"batches": "c3d4"}, 9, 0, "ckpt/x")
    assert "c3d4" not in str(caught.value)
