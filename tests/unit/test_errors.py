# SPDX-License-Identifier: Apache-2.0
"""The parts of errors that several packages share."""

from __future__ import annotations

from ddpilot.errors import did_you_mean


def test_did_you_mean_names_the_nearest() -> None:
    """As code by default; nothing where nothing is near."""
    assert did_you_mean("strat", ["start", "stop"]) == "Did you mean `start`?"
    assert did_you_mean("strat", ["start", "stop"], show="--{}".format) == "Did you mean --start?"
    assert did_you_mean("losses", ["loss", "x", "losse"], num=3) == "Did you mean `losse` or `loss`?"
    assert did_you_mean("xyz", ["start", "stop"]) == ""
    assert did_you_mean("strat", ["start"], cutoff=0.9) == ""
