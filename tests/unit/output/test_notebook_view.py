# SPDX-License-Identifier: Apache-2.0
"""The notebook's view: clearing, limits, errors, widgets."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddpilot.output.notebook_view import NotebookView, WidgetStates
from ddpilot.output.rich_output import RankMessage
from tests.unit.magics.samples import FrontEnd
from tests.unit.output.samples import changed, closed, html, opened, printed, widget


@dataclass
class Shell:
    """The part of a shell that a view looks at."""

    display_pub: FrontEnd = field(default_factory=FrontEnd)


class Stream:
    """The notebook's stdout, which stands among the other outputs."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    def write(self, text: str) -> None:
        """Show text."""
        self._front.publish({"text/html": text})

    def flush(self) -> None:
        """There is nothing to hand on."""


def make_shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A shell with the stdout that its front end shows; pytest replaces it for each test, after the fixtures."""
    shell = Shell()
    monkeypatch.setattr(sys, "stdout", Stream(shell.display_pub))
    monkeypatch.setattr(sys, "stderr", Stream(shell.display_pub))
    return shell


def run(view: NotebookView, *messages: Any, ranks: tuple[int, ...] = (0, 1)) -> None:
    """A cell that publishes `messages`, each shown before the next one comes."""
    view.begin(ranks)
    for second, message in enumerate(messages):
        view.message(message, float(second))
        view.show(second + 0.06)
    view.end()


def clear(rank: int, wait: bool = True) -> Any:
    """What `clear_output` publishes."""
    message = printed(rank, "")
    return type(message)(rank, "clear_output", {"wait": wait})


def test_view_clears_the_output_of_all_ranks_when_all_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step alone stays, without a moment of nothing."""
    shell = make_shell(monkeypatch)
    view = NotebookView(shell)
    run(view, html(0, "old"), html(1, "old"), clear(0), clear(1), html(0, "new"), html(1, "new"))
    assert shell.display_pub.texts == ["[ranks 0,1]", "new"]


def test_view_keeps_what_others_have_shown_when_a_rank_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines and objects of the other rank are shown again, those of both as the other's."""
    shell = make_shell(monkeypatch)
    view = NotebookView(shell)
    both = (printed(0, "both\n"), printed(1, "both\n"))
    view.begin([0, 1])
    for message in (*both, html(0, "same"), html(1, "same"), printed(0, "mine\n"), html(1, "gone")):
        view.message(message, 0.0)
    view.show(1.0)
    view.message(clear(1), 2.0)
    view.message(printed(1, "next\n"), 2.0)
    view.show(3.0)
    view.end()
    assert shell.display_pub.texts == ["[rank 0] both\n", "[rank 0]", "same", "[rank 0] mine\n", "[rank 1] next\n"]


def test_view_waits_with_clearing_for_the_next_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """`clear_output(wait=True)` at the end of a loop leaves the last picture."""
    shell = make_shell(monkeypatch)
    view = NotebookView(shell)
    run(view, html(0, "last"), html(1, "last"), clear(0), clear(1))
    assert shell.display_pub.texts == ["[ranks 0,1]", "last"]
    run(view, html(0, "more"), html(1, "more"), clear(0, wait=False), clear(1, wait=False))
    assert shell.display_pub.texts == []


def test_view_shows_rank_zero_alone_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`output="rank_zero"` counts for objects as well."""
    shell = make_shell(monkeypatch)
    view = NotebookView(shell, "rank_zero")
    run(view, html(1, "one"), html(0, "zero"), printed(1, "one\n"), printed(0, "zero\n"))
    assert shell.display_pub.texts == ["zero", "zero\n"]


def test_view_limits_lines_and_not_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure behind a flood is seen."""
    shell = make_shell(monkeypatch)
    view = NotebookView(shell, limit_bytes=100)
    run(view, printed(0, "x" * 200 + "\n"), printed(0, "unseen\n"), html(0, "figure"), ranks=(0,))
    assert shell.display_pub.texts[1:] == [
        "[rank 0]",
        "figure",
        "ddpilot: 0.0 MB more output of rank 0 not shown (limit 100 bytes per rank, `output_limit_bytes=`)\n",
    ]


def test_view_shows_widgets_that_look_alike_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars are compared by what they show when they are displayed, whatever their ids."""
    shell = make_shell(monkeypatch)
    view = NotebookView(shell)
    run(
        view,
        *(opened(rank, f"bar{rank}", value=0, max=10) for rank in (0, 1, 2)),
        *(widget(rank, f"bar{rank}") for rank in (0, 1, 2)),
        opened(0, "later", value=1),
        widget(0, "later"),
        ranks=(0, 1, 2),
    )
    labels = [data["text/plain"] for name, data in shell.display_pub.outputs if name.endswith("-label")]
    assert labels == ["[ranks 0-2]", "[rank 0]"]


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
    """A bar with a different value does not look the same."""
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
    """A model that refers to its parent does not lead to endless recursion."""
    states = WidgetStates()
    states.take(opened(0, "a", child="IPY_MODEL_b"))
    states.take(opened(0, "b", parent="IPY_MODEL_a"))
    assert states.looks("a") == {"child": {"parent": "widget 0"}}


def test_looks_of_a_closed_or_unknown_widget_are_none() -> None:
    """The state of a closed widget is dropped; comms of other objects are ignored."""
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
