# SPDX-License-Identifier: Apache-2.0
"""Which objects of ranks look the same."""

from __future__ import annotations

from typing import Any

import pytest

from ddpilot.output.rich_output import RichOutput, read_rich
from tests.unit.output.samples import displayed

PNG = {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure size 640x480 with 1 Axes>"}


def fingerprint(data: dict[str, Any], **metadata: Any) -> str:
    """That of a display with this data."""
    return read_rich(displayed(0, data, **metadata)).fingerprint


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PNG, dict(PNG)),
        (
            {"text/html": "<b>1</b>", "text/plain": "<A at 0x7f09a81b7050>"},
            {"text/html": "<b>1</b>", "text/plain": "<A at 0x7f09a8227350>"},
        ),
        (
            {"text/html": "<style>#T_ab12 td {}</style><table id='T_ab12'><td id='T_ab12_row0'>1</td></table>"},
            {"text/html": "<style>#T_cd34 td {}</style><table id='T_cd34'><td id='T_cd34_row0'>1</td></table>"},
        ),
        (
            {"application/vnd.plotly.v1+json": {"data": [1]}, "text/html": '<div id="0b2f"></div>'},
            {"application/vnd.plotly.v1+json": {"data": [1]}, "text/html": "<p>drawn otherwise</p>"},
        ),
    ],
    ids=["figure", "address", "element ids", "plotly"],
)
def test_fingerprint_is_the_same_for_what_looks_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Addresses, random ids and fallbacks that no one sees do not count."""
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PNG, {**PNG, "image/png": "iVBORw0KGgp="}),
        ({"text/html": "<b>1</b>"}, {"text/html": "<b>2</b>"}),
        ({"text/html": '<b id="a1">a1</b>'}, {"text/html": '<b id="a2">a2</b>'}),
        ({"text/html": "deadbeef01"}, {"text/html": "deadbeef02"}),
        ({"application/vnd.plotly.v1+json": {"data": [1]}}, {"application/vnd.plotly.v1+json": {"data": [2]}}),
        ({"text/plain": "at 0x7f09a81b7050"}, {"text/plain": "at 0x7f09a8227350"}),
    ],
    ids=["figure", "html", "short ids stay", "a checksum", "plotly", "text alone"],
)
def test_fingerprint_differs_for_what_looks_different(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Displays that look different have different fingerprints."""
    assert fingerprint(one) != fingerprint(other)


def test_fingerprint_counts_the_metadata() -> None:
    """The same picture in two sizes is two pictures."""
    assert fingerprint(PNG, width=1) != fingerprint(PNG, width=2)


def test_fingerprint_of_a_widget_is_what_it_shows() -> None:
    """Its own data has nothing but a random id."""
    one, other = ({"application/vnd.jupyter.widget-view+json": {"model_id": name}} for name in "ab")
    assert (
        read_rich(displayed(0, one), {"value": 1}).fingerprint
        == read_rich(displayed(1, other), {"value": 1}).fingerprint
    )
    assert (
        read_rich(displayed(0, one), {"value": 1}).fingerprint
        != read_rich(displayed(1, other), {"value": 2}).fingerprint
    )


@pytest.mark.parametrize(
    ("rich", "is_plain"),
    [
        (RichOutput({"text/plain": "2"}), True),
        (RichOutput({"text/plain": "2"}, display_id="x"), False),
        (RichOutput({"text/plain": "2", "text/html": "2"}), False),
    ],
)
def test_rich_is_plain_when_a_line_is_enough_for_it(rich: RichOutput, is_plain: bool) -> None:
    """Text that may be updated needs a place of its own."""
    assert rich.is_plain is is_plain
