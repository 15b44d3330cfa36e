# SPDX-License-Identifier: Apache-2.0
"""Models that differ between ranks when they are wrapped: by what, and on whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpilot.record.flight_ring.log import Tensor
from ddpilot.record.journal import Entry
from ddpilot.watch.analysis import analyze
from ddpilot.watch.snapshot.model import JobSnapshot, RankException
from tests.unit.watch.logs import FILE, Writer, alive, group_of, job, part

COUNT = "DDP expects same model across all ranks, but Rank 0 has 3 params, while rank 1 has inconsistent 4 params."
SHAPE = "[1]: params[1] in this process with sizes [6, 8] appears not to match sizes of the same param in process 0."
USUAL = [["body.weight", [8, 4], "float32", True], ["head.weight", [5, 8], "float32", True]]


def wrapping(parameters: list[Any], *, at: int = 3) -> tuple[Entry, ...]:
    """A rank's note that it is about to wrap a model with these parameters."""
    site = {"file": FILE, "line": 7, "function": "main", "text": "model = DDP(net)"}
    values = {"group": "world", "at": at, "parameters": parameters, "num_parameters": len(parameters), "site": site}
    return (Entry(index=1, time_ns=0, kind="wrapping", values=values),)


def failed(*models: list[Any], message: str = COUNT, more: Any = None) -> JobSnapshot:
    """A job whose ranks wrap these models; torch tells rank 0."""
    group = group_of(*range(len(models)))
    error = RankException(type_name="RuntimeError", message=message)
    ranks = []
    for rank, model in enumerate(models):
        writer = Writer(rank, group).call("all_gather", 7, ddp=part("construction"))
        notes = wrapping(model, **(more or {}).get(rank, {}))
        ranks.append(alive(writer, journal=notes, error=error if rank == 0 else None))
    return job(ranks)


FROZEN = [[*USUAL[0][:3], False], USUAL[1]]
LONGER = [*USUAL, ["probe.weight", [1], "float32", True]]
WIDER = [USUAL[0], ["head.weight", [6, 8], "float32", True]]


@pytest.mark.parametrize(
    ("odd", "message", "code", "said"),
    [
        (LONGER, COUNT, "DDP301", "only rank 2 has `probe.weight`"),
        (FROZEN, COUNT, "DDP304", "`body.weight` is frozen on rank 2 but not on rank 0"),
        (WIDER, SHAPE, "DDP302", "`head.weight` is [5, 8] on rank 0 and [6, 8] on rank 2"),
    ],
)
def test_what_differs_and_on_whom_is_told_by_the_notes(odd: list[Any], message: str, code: str, said: str) -> None:
    """torch says it of the rank that notices, by number, and what is frozen as what is missing."""
    (finding,) = analyze(failed(USUAL, USUAL, odd, message=message)).findings
    assert (finding.code, finding.ranks, finding.why) == (code, (2,), said)
    assert str(finding.place) == f"{FILE}:7  model = DDP(net)"


@pytest.mark.parametrize(
    "view",
    [
        failed(USUAL, USUAL),
        failed(USUAL, LONGER, more={1: {"at": 4}}),
        failed(USUAL, LONGER, message="CUDA out of memory"),
    ],
    ids=["the same", "at another moment", "another error"],
)
def test_models_that_are_not_wrapped_together_are_not_compared(view: JobSnapshot) -> None:
    """Ranks may wrap other models in other groups, or try again."""
    assert not any(finding.code.startswith("DDP30") for finding in analyze(view).findings)


@pytest.mark.parametrize("name", ["head.weight", "norm.running_mean"])
def test_a_dtype_of_one_parameter_or_buffer_is_no_matter_of_sizes(name: str) -> None:
    """DDP sends what has one dtype together, so that the sizes of what is sent differ."""
    whole, half = ([USUAL[0], [name, [5, 8], dtype, False]] for dtype in ("float32", "bfloat16"))
    view = failed(whole, half, message="")
    group = group_of(0, 1)
    for rank, size in ((0, 72), (1, 32)):
        given = (Tensor(dtype="float32", shape=(size,), device="cpu"),)
        writer = Writer(rank, group).wait("broadcast", 7, ddp=part("construction"), inputs=given)
        seen = replace(view.ranks[rank], log=writer.log(), error=None)
        view = replace(view, ranks={**view.ranks, rank: seen})
    (finding,) = analyze(view).findings
    assert (finding.code, finding.why) == ("DDP303", f"`{name}` is float32 on rank 0 and bfloat16 on rank 1")
