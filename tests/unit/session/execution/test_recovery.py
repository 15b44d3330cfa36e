# SPDX-License-Identifier: Apache-2.0
"""Messages after the process group was rebuilt."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ddpilot.session.execution.recovery import describe_rebuilt


def said(restarted: Collection[int] = (), unfinished: Collection[int] = (), **found: Any) -> list[str]:
    """The lines for two ranks with equal replies."""
    value = {"rebound": 0, "lost": [], "unbound": [], "disagreements": [], "named": {}, **found}
    return list(describe_rebuilt([value, value], 0.24, live=(0, 1), restarted=restarted, unfinished=unfinished))


def test_rebuilt_is_one_line_if_nothing_was_lost() -> None:
    """How long it took, what was kept, how many models it has."""
    assert said() == ["the process group was freed and rebuilt in 0.2 s, variables are kept"]
    assert said(rebound=2) == [
        "the process group was freed and rebuilt in 0.2 s, variables are kept; 2 DDP models bound to it"
    ]


def test_rebuilt_names_the_ranks_that_keep_their_variables() -> None:
    """The ranks that were not restarted; not mentioned if all were."""
    assert said(restarted=[1]) == ["the process group was freed and rebuilt in 0.2 s, variables of rank 0 are kept"]
    assert said(restarted=[0, 1]) == ["the process group was freed and rebuilt in 0.2 s"]


def test_rebuilt_names_lost_and_unbound_objects_once() -> None:
    """Each rank has found it."""
    assert said(lost=["groups of `new_group`"], unbound=["Linear was on a group of 2 ranks"])[1:] == [
        "lost with the old group; create again what you still need: groups of `new_group`",
        "not bound to the new group: Linear was on a group of 2 ranks",
    ]


def test_rebuilt_names_the_variable_of_a_model_that_differs() -> None:
    """In place of a line for each parameter, and in what to type."""
    lines = said(disagreements=["parameter 0.weight of Net differs"] * 7, named={"net": "`net` (Net) differs in 7"})
    assert lines[1] == "`net` (Net) differs in 7"
    assert lines[2].startswith("7 parameters would continue to differ: ")
    assert "for p in net.parameters()" in lines[2]
    assert len(lines) == 3


def test_rebuilt_names_five_parameters_of_a_model_in_no_variable() -> None:
    """Such as one that a trainer holds."""
    lines = said(disagreements=[f"parameter {number} of Net differs" for number in range(7)])
    assert lines[1:6] == [f"parameter {number} of Net differs" for number in range(5)]
    assert "(`group.broadcast(p.data)` for each parameter `p` of the model)" in lines[6]


def test_rebuilt_advises_only_variables_that_exist() -> None:
    """Only one that holds a model that differs."""
    named = {
        "a model of class Net in no variable": "a model of class Net in no variable differs",
        "nets['d']": "`nets['d']` (Net) differs",
    }
    assert "for p in nets['d'].parameters()" in said(disagreements=["parameter of Net"], named=named)[-1]
    del named["nets['d']"]
    assert said(disagreements=["parameter of Net"], named=named)[-1].count("`group.broadcast(p.data)` for each") == 1


def test_rebuilt_asks_for_models_that_some_ranks_lack() -> None:
    """No parameter could be compared."""
    lines = said(disagreements=["the ranks have different numbers of DDP models: 1 on rank 0, 0 on rank 1"])
    assert lines[-1] == "run the cells that create the models again, on all ranks, before the next step"


def test_rebuilt_warns_of_unfinished_updates_where_collectives_were_aborted_on_devices() -> None:
    """Stream order: the optimizer's kernels behind an aborted all_reduce have run before anything could stop them."""
    (line,) = said(unfinished={1, 0})[1:]
    assert line.startswith("collectives were aborted on the devices of ranks 0,1: models and optimizers there may hold")
    assert line.endswith("load a checkpoint on all ranks before training on")
