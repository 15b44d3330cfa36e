# SPDX-License-Identifier: Apache-2.0
"""How a pulled value is described."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpilot.errors import RankError
from ddpilot.magics.push_pull import NameHints, _describe


def test_describe_names_a_class_and_the_type_of_anything_else() -> None:
    """A class is described by its name."""
    assert _describe(Fraction) == "the class Fraction"
    assert _describe(Fraction(1)) == "Fraction"
    assert _describe([1, 2]) == "list of 2"


def _notebook() -> dict[str, Any]:
    first, second, lost = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    adam = torch.optim.Adam(second.parameters())
    return {
        "_1": second,  # as IPython keeps what a cell showed
        "number": 3,
        "first": first,
        "second": second,
        "adam": adam,
        "schedule": torch.optim.lr_scheduler.StepLR(adam, 1),
        "both": torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1),
        "alone": torch.optim.SGD(lost.parameters(), 0.1),
    }


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("number", "The notebook has `number`: `%ddp push number` copies it to the ranks"),
        ("second", "The notebook has `second`: `%ddp push second` copies it to the ranks"),
        ("adam", "The notebook has `adam`: `%ddp push second adam` copies both to the ranks"),
        ("schedule", "The notebook has `schedule`: `%ddp push second adam schedule` copies all to the ranks"),
        ("both", "The notebook has `both`: `%ddp push first second both` copies all to the ranks"),
        ("alone", "The notebook has `alone` without the model that it trains: create both on the ranks"),
    ],
)
def test_a_missing_optimizer_is_pushed_with_its_model(name: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushed alone it is refused, so the suggested line names everything that it needs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch's optimizers would set it
    shell_session: Any = SimpleNamespace(shell=SimpleNamespace(user_ns=_notebook(), user_ns_hidden={}), is_auto=False)
    error = RankError("running", found=f"rank 0 raised NameError: name '{name}' is not defined", rank=0, host="here")
    NameHints(shell_session).advise(error)
    assert error.fix == fix
