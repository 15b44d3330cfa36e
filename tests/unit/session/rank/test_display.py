# SPDX-License-Identifier: Apache-2.0
"""Results of cells, and the loggers of a rank."""

from __future__ import annotations

import logging

import pytest

from ddpilot.session.rank.kernel import RankDisplayFormatter
from ddpilot.session.rank.main import RankApp


class Counted(float):
    """A number with a representation of its own."""

    def _repr_html_(self) -> str:
        return "<b>1</b>"


@pytest.mark.parametrize(("value", "text"), [(1, "1"), (True, "True"), ("a", "'a'"), (0.5, "0.5")])
def test_format_asks_only_for_the_text_of_a_number_or_string(
    monkeypatch: pytest.MonkeyPatch, value: object, text: str
) -> None:
    """The other formatters have none."""
    formatter = RankDisplayFormatter()
    html = formatter.formatters["text/html"]
    monkeypatch.setattr(type(html), "__call__", lambda *_: pytest.fail("asked"))
    assert formatter.format(value) == ({"text/plain": text}, {})


def test_format_asks_all_for_other_objects_and_once_a_printer_was_registered() -> None:
    """By a class of the user, or by `for_type`."""
    formatter = RankDisplayFormatter()
    assert formatter.format(Counted(1))[0] == {"text/plain": "1.0", "text/html": "<b>1</b>"}
    formatter.formatters["text/html"].for_type(int, lambda value: f"<i>{value}</i>")
    assert formatter.format(1)[0] == {"text/plain": "1", "text/html": "<i>1</i>"}


def test_app_leaves_the_handlers_of_loggers_open() -> None:
    """A handler of a preloaded module continues to write."""
    closed: list[logging.Handler] = []

    class Handler(logging.NullHandler):
        def close(self) -> None:
            closed.append(self)
            super().close()

    handler = Handler()
    RankApp(log_level=logging.CRITICAL)  # type: ignore[no-untyped-call]  # ipykernel annotates no type
    assert closed == []
    assert not logging.getLogger("RankApp").isEnabledFor(logging.ERROR)
    handler.close()
