# SPDX-License-Identifier: Apache-2.0
"""Widgets of ranks compared by what they show."""

from __future__ import annotations

from typing import Any

from ddpilot.output.view import RankMessage
from ddpilot.output.widget_states import WidgetStates
from tests.unit.session.shown.samples import changed, closed, opened


def bar(states: WidgetStates, rank: int, prefix: str, **state: Any) -> str:
    """A box around a bar with a layout, as tqdm makes it; the box's id."""
    states.take(opened(rank, f"{prefix}-layout", width="100%"))
    states.take(opened(rank, f"{prefix}-bar", layout=f"IPY_MODEL_{prefix}-layout", **state))
    states.take(opened(rank, f"{prefix}-box", children=[f"IPY_MODEL_{prefix}-bar"]))
    return f"{prefix}-box"


def test_looks_are_the_same_when_only_ids_differ() -> None:
    """Widgets inside widgets are compared, not named."""
    states = WidgetStates()
    one, other = bar(states, 0, "a", value=0, max=9), bar(states, 1, "b", value=0, max=9)
    assert states.looks(one) == states.looks(other)
    assert "a-bar" not in str(states.looks(one))


def test_looks_differ_when_a_widget_inside_has_changed() -> None:
    """A bar that is further is another bar."""
    states = WidgetStates()
    one, other = bar(states, 0, "a", value=0), bar(states, 1, "b", value=0)
    states.take(changed(1, "b-bar", value=5))
    assert states.looks(one) != states.looks(other)
    states.take(changed(0, "a-bar", value=5))
    assert states.looks(one) == states.looks(other)


def test_looks_count_binary_values() -> None:
    """Two images with different bytes look different."""
    states = WidgetStates()
    for rank, name, value in ((0, "a", b"one"), (1, "b", b"two"), (2, "c", b"one")):
        data = {"state": {"format": "png"}, "buffer_paths": [["value"]]}
        states.take(RankMessage(rank, "comm_open", {"comm_id": name, "data": data}, {}, [value]))
    assert states.looks("a") != states.looks("b")
    assert states.looks("a") == states.looks("c")


def test_looks_end_where_widgets_hold_each_other() -> None:
    """A model that refers to one above it is no endless tree."""
    states = WidgetStates()
    states.take(opened(0, "a", child="IPY_MODEL_b"))
    states.take(opened(0, "b", parent="IPY_MODEL_a"))
    assert states.looks("a") == {"child": {"parent": "widget 0"}}


def test_looks_of_a_closed_or_unknown_widget_are_none() -> None:
    """Nothing is kept of a widget that is gone; a comm that is no widget's is passed over."""
    states = WidgetStates()
    states.take(opened(0, "a", value=1))
    states.take(closed(0, "a"))
    states.take(RankMessage(0, "comm_open", {"comm_id": "other", "data": {"hello": 1}}))
    assert states.looks("a") is None
    assert states.looks("other") is None


def test_twins_are_the_models_in_the_same_places() -> None:
    """Box to box, bar to bar, layout to layout."""
    states = WidgetStates()
    pairs = states.twins(bar(states, 0, "a", value=0), bar(states, 1, "b", value=0))
    assert set(pairs) == {("a-box", "b-box"), ("a-bar", "b-bar"), ("a-layout", "b-layout")}
