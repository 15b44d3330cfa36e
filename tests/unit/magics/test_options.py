# SPDX-License-Identifier: Apache-2.0
"""`%ddp start` has every option of a session, and no default of its own."""

from __future__ import annotations

import dataclasses
import re

import pytest

from ddpilot.errors import LaunchError
from ddpilot.magics.options import add_options, describe_options, to_arguments
from ddpilot.magics.parser import Helped, MagicParser
from ddpilot.session.options import SessionOptions

LINE = (
    "-n 2 --gpus 0,1 --backend gloo --seed 7 --app fastai --app mine --env A=1 --env B=x=y --preload numpy --respawn "
    "--keep-cache --verbose --output rank_zero --output-limit-bytes 5 --no-watch --no-guard --on-finding stop "
    "--stall-warn-s 7"
)


def read(line: str) -> dict[str, object]:
    """The arguments in a line."""
    parser = MagicParser("%ddp start")
    add_options(parser)
    return to_arguments(vars(parser.parse_args(line.split())))


def test_options_read_every_field_of_a_session() -> None:
    """A field that is new there needs a spelling here."""
    arguments = read(LINE)
    assert set(arguments) == {field.name for field in dataclasses.fields(SessionOptions)}
    assert SessionOptions(**arguments) == SessionOptions(  # type: ignore[arg-type]
        nproc_per_node=2,
        gpus=(0, 1),
        backend="gloo",
        seed=7,
        apps=("fastai", "mine"),
        env={"A": "1", "B": "x=y"},
        preload=("numpy",),
        respawn=True,
        keep_cache=True,
        verbose=True,
        output="rank_zero",
        output_limit_bytes=5,
        watch=False,
        guard=False,
        on_finding="stop",
        stall_warn_s=7.0,
    )


def test_options_leave_what_was_not_typed_to_the_session() -> None:
    """Defaults stand in one place."""
    assert read("") == {}
    assert read("-n auto") == {"nproc_per_node": "auto"}


def test_options_are_checked_by_the_session() -> None:
    """The magic has no rule of its own."""
    with pytest.raises(LaunchError, match=r"reading `nproc_per_node`: 'some'\. Give a number of ranks"):
        SessionOptions(**read("-n some"))  # type: ignore[arg-type]


def test_options_say_what_they_do() -> None:
    """Each option has a line of help, `--no-watch` and `--no-guard` what they turn off, and no line is about Python."""
    with pytest.raises(Helped) as helped:
        read("-h")
    text = " ".join(str(helped.value).split())
    assert text.count("--") >= 2 * len(dataclasses.fields(SessionOptions))
    assert "--no-watch do not record collectives" in text
    assert "--no-guard do not look for training" in text
    assert not re.search(r"None|\(\)|True|False|`|function|Launcher", text)


@pytest.mark.parametrize("line", ["", LINE, "-n 4", "--gpus 0,2", "--env A=1"])
def test_describe_options_gives_the_line_again(line: str) -> None:
    """Reading what it says makes the same options."""
    options = SessionOptions(**read(line))  # type: ignore[arg-type]
    said = describe_options(options)
    assert said.startswith("%ddp start")
    assert SessionOptions(**read(said.removeprefix("%ddp start"))) == options  # type: ignore[arg-type]
