# SPDX-License-Identifier: Apache-2.0
"""Guard on an accelerator reads numbers without waiting for them. What it finds: `test_zoo.py`."""

from __future__ import annotations

import pytest

from tests.accelerator import why_not
from tests.accelerator.on_device import call

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def test_a_loss_that_is_read_late_is_noted_with_the_line_of_its_backward() -> None:
    """Whatever line runs when its number arrives. At the end, the last backward of which all was read is noted."""
    found = call("tests.accelerator.late_losses:noted", limit_s=100)
    assert found == {"bad": [["nan", "loss.backward()  # the bad one"]], "checked": [[2]]}


def test_losses_beyond_those_that_may_be_on_their_way_are_noted_as_left_out() -> None:
    """And at the end, no backward is noted as the last that was read if a loss is still on its way."""
    assert call("tests.accelerator.late_losses:left_out", limit_s=100) == {"unchecked": [3, 4], "checked": []}


def test_fingerprints_are_those_of_the_cpu_and_nothing_waits_for_them() -> None:
    """Several may be on their way at once; also where the middle of a gradient is 0."""
    found = call("tests.accelerator.fingerprints:compare", limit_s=100)
    assert found == {"begun": True, "waited": True, "gradients": True, "host_syncs": 0}


def test_the_copy_before_the_last_step_waits_for_nothing() -> None:
    """It is read at the end."""
    assert call("tests.accelerator.fingerprints:last_windows", limit_s=100) == {"alike": True, "host_syncs": 0}


def test_nothing_is_begun_or_asked_while_a_graph_is_captured() -> None:
    """An event that is asked then spoils the user's graph."""
    found = call("tests.accelerator.fingerprints:while_capturing", limit_s=100)
    assert found == {"before": True, "begun": None, "meanwhile": False}


def test_memory_of_a_copy_is_used_again_once_it_is_released() -> None:
    """By the next copy of as much."""
    assert call("tests.accelerator.fingerprints:memory_is_used_again", limit_s=100) == [False, False, True, True]
