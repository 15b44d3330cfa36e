# SPDX-License-Identifier: Apache-2.0
"""Reading lines: ranks, variables, wrong options."""

from __future__ import annotations

import argparse

import pytest

from ddpilot.magics.parser import Helped, MagicParser, MagicUsageError, parse_rank, parse_ranks, parse_variable


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", (0,)), ("0,2-3", (0, 2, 3)), ("3,1,1", (1, 3)), ("0-0", (0,)), ("1, 2", (1, 2))]
)
def test_parse_ranks_reads_numbers_and_ranges(text: str, ranks: tuple[int, ...]) -> None:
    """Sorted, each once."""
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "0,", "1-x", "1.5"])
def test_parse_ranks_refuses_what_is_no_list(text: str) -> None:
    """The text is in the answer."""
    with pytest.raises(argparse.ArgumentTypeError, match="is no list of ranks such as 0,2-3"):
        parse_ranks(text)


def test_parse_rank_and_parse_variable_refuse_what_they_cannot_read() -> None:
    """One rank is a number; a variable has a name and a value, which may contain =."""
    assert parse_rank("2") == 2
    assert parse_variable("A=b=c") == ("A", "b=c")
    with pytest.raises(argparse.ArgumentTypeError, match="'0,1' is no number of a rank"):
        parse_rank("0,1")
    for wrong in ("A", "=b"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=value"):
            parse_variable(wrong)


def test_parser_raises_where_argparse_would_end_the_process() -> None:
    """What was wrong, then the right use; -h is an answer too."""
    parser = MagicParser("%ddp pull", description="Copy.")
    parser.add_argument("--rank", type=parse_rank, metavar="R")
    with pytest.raises(MagicUsageError) as caught:
        parser.parse_args(["--rank", "x"])
    assert str(caught.value) == (
        "reading `%ddp pull`: argument --rank: 'x' is no number of a rank. Right is: %ddp pull [-h] [--rank R]"
    )
    assert caught.value._render_traceback_() == [f"UsageError: {caught.value}"]
    with pytest.raises(Helped, match="(?s)usage: %ddp pull.*Copy.*--rank R"):
        parser.parse_args(["-h"])
    assert vars(parser.parse_args([])) == {}


def test_parser_takes_no_option_by_its_beginning() -> None:
    """`--rank` for `--ranks` would become ambiguous with the next option."""
    parser = MagicParser("%%ddp")
    parser.add_argument("--ranks")
    with pytest.raises(MagicUsageError, match="unrecognized arguments: --rank 0"):
        parser.parse_args(["--rank", "0"])
