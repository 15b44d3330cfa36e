# SPDX-License-Identifier: Apache-2.0
"""Derive from the order of events which backwards DDP reduces."""

from __future__ import annotations

import pytest
import torch

from ddpilot.guard.probes.parameters.ddp_model import BackwardTracker, look_at_gradients

# Events of one optimizer step, and why the last backward was not reduced.
CASES = {
    "FB": "",
    "fbfbFB": "",
    "FBFB": "",
    "FFB": "",
    "Fb": "",
    "FFBFB": "",
    "BFB": "",
    "B": "bypass",
    "FBB": "bypass",
    "FRB": "twice",
    "FFBB": "two forwards",
    "fb": "no_sync",
    "FBfb": "no_sync",
    "fB": "forward in no_sync",
    "FFFBBB": "two forwards",
}


def follow(reductions: BackwardTracker, events: str) -> str:
    """Why the last backward of `events` was not reduced."""
    why = ""
    for event in events:
        if event in "Ff":
            reductions.forward(syncs=event == "F")
        else:
            why = reductions.backward(syncs=event != "b", retains=event == "R")
    return why


@pytest.mark.parametrize("events", CASES)
def test_reductions_say_why_a_backward_was_not_reduced(events: str) -> None:
    """In the first step, and in one after an evaluation that left forwards behind."""
    reductions = BackwardTracker()
    assert follow(reductions, events) == CASES[events]
    assert reductions.since(0) == events
    reductions.step()
    position = reductions.position
    assert follow(reductions, "fbFB") == ""
    reductions.step()
    assert reductions.since(position) == "fbFB"


def test_reductions_keep_little_of_what_was() -> None:
    """After many events the newest are kept, and positions continue."""
    reductions = BackwardTracker()
    for _ in range(5000):
        follow(reductions, "FB")
    assert reductions.position == 10_000
    assert reductions.num_forwards == 5000
    assert reductions.since(9996) == "FBFB"
    assert len(reductions.since(0)) == 32


@pytest.mark.parametrize("is_sparse", [False, True])
def test_look_at_gradients_finds_those_that_have_changed(is_sparse: bool) -> None:
    """Also gradients of an embedding with `sparse=True`, which have no address."""
    table = torch.nn.Embedding(3, 2, sparse=is_sparse)

    def backward() -> None:
        table(torch.tensor([0, 2])).sum().backward()

    state, has_changed_since = look_at_gradients([table.weight])
    seen = [state()]
    assert not has_changed_since(seen[0])
    for _ in range(2):
        backward()
        assert has_changed_since(seen[-1])
        seen.append(state())
        assert not has_changed_since(seen[-1])
    table.weight.grad = None
    assert has_changed_since(seen[-1])
