# SPDX-License-Identifier: Apache-2.0
"""Objects of ranks in a notebook: one place for all that look alike."""

from __future__ import annotations

from ddpilot.output.equal_displays import SharedDisplays
from ddpilot.output.rich_output import RichOutput
from tests.unit.magics.samples import FrontEnd


def alike(ranks: list[int], text: str, display_id: str = "", widget: str = "") -> dict[int, RichOutput]:
    """The same object on `ranks`; each rank has its own widget."""
    return {rank: one(text, display_id, f"{widget}{rank}" if widget else "") for rank in ranks}


def one(text: str, display_id: str = "", widget: str = "") -> RichOutput:
    """An object that shows `text`."""
    data = {"text/html": text}
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": widget}} if widget else {}
    return RichOutput({**data, **view}, {}, display_id, fingerprint=text)


def make() -> tuple[SharedDisplays, FrontEnd, list[tuple[str, dict[int, str]]]]:
    """SharedDisplays, what they show, and the widgets that were paired."""
    front, pairs = FrontEnd(), list[tuple[str, dict[int, str]]]()
    return SharedDisplays(lambda: front, lambda shown, others: pairs.append((shown, others))), front, pairs


def test_places_show_what_looks_alike_once() -> None:
    """One label per object."""
    places, front, _ = make()
    places.show(alike([0, 1, 2, 3], "figure"))
    places.show(alike([2], "other"))
    assert front.texts == ["[ranks 0-3]", "figure", "[rank 2]", "other"]


def test_places_add_a_late_rank_to_the_label() -> None:
    """A rank that shows the same later joins; nothing is shown twice."""
    places, front, _ = make()
    assert places.show(alike([0], "figure")) is not None
    assert places.show(alike([1, 2], "figure")) is None
    assert front.texts == ["[ranks 0-2]", "figure"]


def test_places_keep_the_order_of_a_rank() -> None:
    """A rank that shows B then A does not join an A above its B."""
    places, front, _ = make()
    places.show(alike([0], "A"))
    places.show(alike([0], "B"))
    places.show(alike([1], "B"))
    places.show(alike([1], "A"))
    assert front.texts == ["[rank 0]", "A", "[ranks 0,1]", "B", "[rank 1]", "A"]


def test_places_show_each_repeat_of_a_rank() -> None:
    """The same figure twice from one rank is two figures."""
    places, front, _ = make()
    places.show(alike([0], "A"))
    places.show(alike([0], "A"))
    assert front.texts == ["[rank 0]", "A"] * 2


def test_places_join_nothing_of_an_earlier_cell() -> None:
    """The same figure in the next cell is shown there."""
    places, front, _ = make()
    places.show(alike([0], "A"))
    places.begin()
    places.show(alike([1], "A"))
    assert front.texts == ["[rank 0]", "A", "[rank 1]", "A"]


def test_places_follow_the_lowest_rank_while_a_cell_runs() -> None:
    """Displays with ids change in place; a rank that is only behind gets no place of its own."""
    places, front, _ = make()
    places.show(alike([0, 1], "0%", "bar"))
    for rank, text in ((0, "50%"), (1, "50%"), (0, "100%"), (1, "100%")):
        places.update(alike([rank], text, "bar"))
    assert places.settle() == []
    assert front.texts == ["[ranks 0,1]", "100%"]
    assert front.num_updates == 2


def test_places_part_ranks_that_differ_when_the_cell_ends() -> None:
    """A rank with a changed display gets its own one, which is then updated separately."""
    places, front, _ = make()
    places.show(alike([0, 1, 2, 3], "...", "loss"))
    for rank in range(4):
        places.update({rank: one(f"loss {rank % 2}", "loss")})
    assert len(places.settle()) == 1
    assert front.texts == ["[ranks 0,2]", "loss 0", "[ranks 1,3]", "loss 1"]
    places.begin()
    places.update({1: one("loss 9", "loss")})
    assert front.texts == ["[ranks 0,2]", "loss 0", "[ranks 1,3]", "loss 9"]


def test_places_keep_ids_of_ranks_apart() -> None:
    """Two ranks that use the same id for different things change different things."""
    places, front, _ = make()
    places.show({0: one("zero", "mine")})
    places.show({1: one("one", "mine")})
    places.update({1: one("one more", "mine")})
    assert front.texts == ["[rank 0]", "zero", "[rank 1]", "one more"]
    assert len({name for name, _ in front.outputs}) == 4


def test_places_pass_over_updates_of_what_was_never_shown() -> None:
    """As Jupyter does."""
    places, front, _ = make()
    places.update({0: one("new", "unknown")})
    assert front.outputs == []


def test_places_change_earlier_displays_of_an_id_too() -> None:
    """`display(x, display_id=...)` a second time changes the first, as in Jupyter."""
    places, front, _ = make()
    places.show({0: one("first", "id")})
    places.show({0: one("second", "id")})
    assert front.texts == ["[rank 0]", "second"] * 2


def test_places_show_the_lowest_ranks_widget_and_pair_the_others_with_it() -> None:
    """A lower rank that comes late takes the screen over, since its bar is the one that is followed."""
    places, front, pairs = make()
    places.show(alike([1, 2], "bar", widget="w"))
    assert pairs == [("w1", {2: "w2"})]
    places.show(alike([0], "bar", widget="w"))
    assert pairs[1:] == [("w0", {1: "w1", 2: "w2"})]
    assert front.texts == ["[ranks 0-2]", "bar"]
    assert front.outputs[1][1]["application/vnd.jupyter.widget-view+json"] == {"model_id": "w0"}


def test_places_have_no_labels_when_one_rank_alone_is_shown() -> None:
    """With output="rank_zero" a notebook reads like one of a single process."""
    places, front, _ = make()
    places.is_labelled = False
    places.show(alike([0], "A"))
    assert front.texts == ["A"]


def test_places_label_nothing_that_cannot_be_seen() -> None:
    """A bar that its library takes away at the end leaves no label, nor does a style sheet; what comes back has one."""
    places, front, _ = make()
    places.show(alike([0, 1], "bar", "id"))
    places.update(alike([0, 1], " ", "id"))
    places.show(alike([0], "<style>b {}</style>"))
    assert [text for text in front.texts if text.startswith("[")] == []
    places.update(alike([0, 1], "result", "id"))
    assert front.texts[:2] == ["[ranks 0,1]", "result"]
