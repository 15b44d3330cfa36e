# SPDX-License-Identifier: Apache-2.0
"""Decide which steps are checked, from their events and from the time of steps and checks."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.parameters.parameter_names import find_parameter_names
from ddpilot.guard.probes.parameters.parameter_sets import ParameterSet, ParameterSets
from ddpilot.record.call_sites import SiteFinder
from ddpilot.record.journal import JournalWriter, read_journal


def checked_steps(monkeypatch: pytest.MonkeyPatch, num_steps: int, step_s: float, cost_s: float) -> list[int]:
    """Those of `num_steps` steps of parameters without DDP that are checked."""
    now_s = 1000.0
    monkeypatch.setattr("ddpilot.guard.probes.parameters.parameter_sets.time.monotonic", lambda: now_s)
    unit = ParameterSet(number=1, key=[], model=None)
    checked = []
    for _ in range(num_steps):
        now_s += step_s
        if unit.advance():
            now_s += cost_s
            unit.checked(cost_s)
            checked.append(unit.count)
    return checked


@pytest.mark.parametrize(
    ("step_s", "cost_s", "stride"),
    [(0.001, 0.0005, 25), (0.02, 0.001, 25), (0.04, 0.001, 5), (0.2, 0.001, 1), (0.2, 0.02, 5), (0.2, 0.5, 25)],
)
def test_steps_are_checked_by_how_long_they_take(
    monkeypatch: pytest.MonkeyPatch, step_s: float, cost_s: float, stride: int
) -> None:
    """At most 0.75 s apart if that costs at most 2 % of the time; ranks with different times check common steps."""
    steps = checked_steps(monkeypatch, 200, step_s, cost_s)
    assert steps[:5] == [1, 2, 3, 4, 5]
    assert 16 in steps
    assert [step for step in steps if step > 16] == [step for step in range(17, 201) if step % stride == 0]


def test_a_pause_between_steps_has_the_next_one_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example after an evaluation; later steps are checked as before."""
    now_s = 1000.0
    monkeypatch.setattr("ddpilot.guard.probes.parameters.parameter_sets.time.monotonic", lambda: now_s)
    unit = ParameterSet(number=1, key=[], model=None)
    checked = []
    for number in range(1, 101):
        now_s += 60.0 if number == 50 else 0.02
        if unit.advance():
            unit.checked(0.001)
            checked.append(unit.count)
    assert checked == [1, 2, 3, 4, 5, 16, 25, 50, 51, 75, 100]


@pytest.fixture
def book(tmp_path: Path) -> Iterator[ParameterSets]:
    """Without a DDP model, noting into a journal."""
    finder = SiteFinder(torch="torch")
    journal = JournalWriter(tmp_path / "journal", rank=0)
    yield ParameterSets(Notes("steps", journal, rank=0, finder=finder, report=pytest.fail), list)
    journal.close()


def step(book: ParameterSets, optimizer: torch.optim.Optimizer) -> None:
    """A step without a closure."""
    book.end_step(book.begin_step(optimizer, "era", has_closure=False))


@pytest.fixture
def num_plans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often an optimizer's parameters were sorted."""
    plans, plan = [], ParameterSets._plan

    def counted(*args: Any) -> None:
        plans.append(args)
        plan(*args)

    monkeypatch.setattr(ParameterSets, "_plan", counted)
    return lambda: len(plans)


@pytest.mark.usefixtures("compiler_is_loaded")
def test_parameters_are_looked_through_once_for_the_first_step(
    book: ParameterSets, num_plans: Callable[[], int]
) -> None:
    """Not twice because it is also checked."""
    step(book, torch.optim.SGD(nn.Linear(2, 2).parameters()))
    assert num_plans() == 1


@pytest.mark.usefixtures("compiler_is_loaded")
@pytest.mark.parametrize("is_exiting", [False, True])
def test_optimizer_that_is_freed_as_the_interpreter_ends_is_left_alone(
    book: ParameterSets, monkeypatch: pytest.MonkeyPatch, is_exiting: bool
) -> None:
    """The names of modules are None by then; an error there would be printed as one of the user's program."""
    monkeypatch.setattr(sys, "is_finalizing", lambda: is_exiting)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    step(book, optimizer)
    key = id(optimizer)
    del optimizer
    gc.collect()
    assert (key in book._known) == is_exiting


@pytest.mark.usefixtures("compiler_is_loaded")
def test_a_step_keeps_no_variable_of_the_users_function(book: ParameterSets) -> None:
    """Such as the logits, which the next line deletes; names are looked for there. The user's `locals()` is kept."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())

    def train(*, asks: bool) -> tuple[bool, object]:
        logits = torch.zeros(2)
        freed = weakref.ref(logits)
        held = locals() if asks else None
        step(book, optimizer)
        del logits
        return freed() is None, held

    assert train(asks=False) == (True, None)
    assert isinstance(held := train(asks=True)[1], dict)
    assert held["asks"] is True


@pytest.mark.usefixtures("compiler_is_loaded")
def test_what_cannot_be_compared_is_looked_through_more_and_more_seldom(
    book: ParameterSets, num_plans: Callable[[], int]
) -> None:
    """An optimizer of sharded parameters only, as with FSDP: at steps 1, 2, 4, 8, ... of 1,000."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3, device="meta"))])
    for _ in range(1000):
        step(book, optimizer)
    assert num_plans() == 10


@pytest.mark.usefixtures("compiler_is_loaded")
def test_what_is_added_to_an_optimizer_later_is_compared_from_some_step_on(book: ParameterSets, tmp_path: Path) -> None:
    """A parameter group that can be compared joins one that cannot."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3, device="meta"))])
    for number in range(1, 9):
        if number == 6:
            optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
        step(book, optimizer)
    assert [entry.kind for entry in read_journal(tmp_path / "journal").entries] == ["parameter_set", "step"]


@pytest.mark.usefixtures("compiler_is_loaded")
def test_tensors_of_no_module_are_not_compared(book: ParameterSets, tmp_path: Path) -> None:
    """Latents or inputs that each rank fits to its own samples: no wrapper is missing."""
    latents = torch.optim.SGD([torch.zeros(3, requires_grad=True)])
    both = torch.optim.SGD([torch.zeros(3, requires_grad=True), nn.Parameter(torch.zeros(3))])
    step(book, latents)
    assert read_journal(tmp_path / "journal").entries == ()
    step(book, both)
    assert [entry.kind for entry in read_journal(tmp_path / "journal").entries] == ["parameter_set", "step"]


def test_settings_of_the_optimizer_are_noted_without_its_learning_rates(book: ParameterSets, tmp_path: Path) -> None:
    """Learning rates are noted with each step, since schedules change them."""
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.1, weight_decay=0.01)
    optimizer.add_param_group({"params": nn.Linear(2, 1).parameters(), "weight_decay": 0})
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step(book, optimizer)
    settings = read_journal(tmp_path / "journal").entries[0].values["settings"]
    assert settings["optimizer"] == "AdamW"
    assert settings["weight_decay"] == "0.01, 0"
    assert settings["betas"] == "(0.9, 0.999)"
    assert not {"lr", "initial_lr", "params"} & settings.keys()


pytestmark = pytest.mark.usefixtures("compiler_is_loaded")


class Program:
    """Has its module as an attribute."""

    def __init__(self) -> None:
        self.head = nn.Linear(2, 1)

    def names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """As found from here."""
        return list(find_parameter_names(optimizer, sys._getframe()).values())


class Proxy:
    """Stands for an object that does not exist."""

    @property
    def __class__(self) -> Any:
        """Nobody may ask."""
        raise RuntimeError("working outside of a context")

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise AssertionError


def test_names_are_those_of_variables_and_their_attributes() -> None:
    """Also from the caller's caller; parameters without a name are left out, and proxies are not evaluated."""
    body, program, proxy = nn.Linear(2, 2), Program(), Proxy()
    alone = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*body.parameters(), alone, *program.head.parameters()], lr=0.1)
    assert sorted(program.names(optimizer)) == ["body.bias", "body.weight", "head.bias", "head.weight"]
    assert find_parameter_names(optimizer, None) == {}
    assert type(proxy) is Proxy


@pytest.mark.skipif(torch.__version__ < "2.6", reason="optimizers know no names")
def test_names_that_an_optimizer_was_given_are_taken() -> None:
    """They are the module's own."""
    body = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(body.named_parameters(), lr=0.1)
    assert sorted(find_parameter_names(optimizer, None).values()) == ["bias", "weight"]
