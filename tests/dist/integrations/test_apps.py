# SPDX-License-Identifier: Apache-2.0
"""An app of a different package, from the start of a session to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpilot import RankError, Session

SOURCE = """
import os
from pathlib import Path
from ddpilot.session.apps import App

FOLDER = Path(os.environ["APP_FOLDER"])

def start(context):
    context.namespace["told"] = (context.rank, context.world_size, str(context.device), context.seed, context.verbose)
    context.namespace["is_everywhere"] = context.is_everywhere
    context.namespace["enter"] = context.enter_group
    context.cleanup.callback(note, context.rank, "cleaned up")

def note(rank, what):
    with (FOLDER / f"{rank}.txt").open("a") as file:
        file.write(what + "\\n")

APP = App(
    name="mine",
    preload=("colorsys",),
    imports=("from fractions import Fraction",),
    initializer=start,
    after_cell=lambda context: note(context.rank, "cell"),
    finalizer=lambda context: note(context.rank, "finalized"),
)
"""


@pytest.fixture
def app_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the app "mine"; the folder is where the app keeps its notes."""
    (tmp_path / "mineapp.py").write_text(SOURCE)
    info = tmp_path / "mineapp-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mineapp\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ddpilot.apps]\nmine = mineapp:APP\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("APP_FOLDER", str(tmp_path))
    return tmp_path


def test_an_app_prepares_each_rank_and_is_undone_at_the_end(app_folder: Path) -> None:
    """Its imports and initializer run before the first cell, its finalizer and the clean-up after the last."""
    with Session(2, apps=("mine",), seed=5, verbose=True, output="silent") as session:
        assert session.pull("told") == [(0, 2, "cpu", 5, True), (1, 2, "cpu", 5, True)]
        session.execute("import sys; half = Fraction(1, 2), 'colorsys' in sys.modules; size = enter().world_size")
        assert [str(half) for half, _ in session.pull("half")] == ["1/2", "1/2"]
        assert [has for _, has in session.pull("half")] == [True, True]
        assert session.pull("size") == [2, 2]
        session.execute("everywhere = is_everywhere()")
        session.execute("alone = is_everywhere()", ranks=[1])
        assert session.pull("everywhere") == [True, True]
        assert session.pull("alone", rank=1) is False
        with pytest.raises(RankError, match="ZeroDivisionError"):
            session.execute("1 / 0", ranks=[0])
    notes = [(app_folder / f"{rank}.txt").read_text().splitlines() for rank in range(2)]
    assert [each[-2:] for each in notes] == [["finalized", "cleaned up"]] * 2
    assert notes[0].count("cell") == 3
    assert notes[1].count("cell") == 3
