# SPDX-License-Identifier: Apache-2.0
"""Course-style fastai notebooks for one process, ported with a few lines of magics: same samples, same metric."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.notebook.running import code_cells, run_cells
from tests.soak import soak

WATCH = """
import hashlib, json, os
epochs, metrics = [], {}

class Watch(Callback):
    "Notes the contents of every sample that a training step was taken on."
    order = -8
    def before_fit(self): self.run = not hasattr(self.learn, "lr_finder")
    def before_train(self): epochs.append([])
    def after_train(self): self.has_trained = True
    def before_epoch(self): self.has_trained = False
    def after_fit(self):
        if self.has_trained:
            names = list(self.recorder.metric_names)[1:-1]
            metrics.update(zip(names, map(float, self.recorder.values[-1])))
    def before_batch(self):
        if self.training:
            for row in zip(*self.xb):
                numbers = torch.cat([part.flatten().double() for part in row])
                told = numbers[numbers != 1] if row[0].dtype == torch.int64 and len(row) == 1 else numbers  # no padding
                epochs[-1].append(hashlib.md5(told.numpy().tobytes()).hexdigest())

defaults.callbacks.append(Watch)
"""
TELL = """
told = {"epochs": epochs, "metrics": metrics, "num_train": len(dls.train_ds)}
Path(f"told-{os.environ.get('RANK', 'alone')}.json").write_text(json.dumps(told))
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A notebook, and the lines that port it; they go in front of the cell that imports fastai."""

    notebook: str
    port: str = "%load_ext ddpilot\n%ddp start -n 2 --app fastai\n%ddp auto on"
    metric: str = "accuracy"


CASES = [
    Case(notebook="images", port="%load_ext ddpilot\n%ddp start -n 2 --app fastai\n%ddp push path\n%ddp auto on"),
    Case(notebook="tabular"),
    Case(notebook="text"),
]


@dataclass(frozen=True)
class Told:
    """What a process told about its training."""

    epochs: list[list[str]]
    metrics: dict[str, float]
    num_train: int


def run_and_listen(cells: list[str], port: str, folder: Path) -> list[Told]:
    """Run the cells as they are, then with the magics `port`, both in one kernel; what each process told of training.

    To start a kernel that has fastai takes 5 s.
    """
    (at,) = [number for number, source in enumerate(cells) if "from fastai" in source]
    watched = [*cells[: at + 1], WATCH, *cells[at + 1 :], TELL]
    run_cells([*watched, *watched[:at], port, *watched[at:]], folder)
    return [Told(**json.loads((folder / f"told-{name}.json").read_text())) for name in ("alone", "0", "1")]


@pytest.mark.timeout(300)
@soak
@pytest.mark.parametrize("case", CASES, ids=[case.notebook for case in CASES])
def test_a_ported_notebook_trains_on_the_same_samples_to_the_same_metric(case: Case, tmp_path: Path) -> None:
    """At most 5 lines; every sample once per epoch on two ranks; the metric within 2 points of one process."""
    assert len(case.port.splitlines()) <= 5
    cells = code_cells(Path(__file__).with_name(f"{case.notebook}.ipynb"))
    one, first, second = run_and_listen(cells, case.port, tmp_path)
    assert len(one.epochs) == len(first.epochs) == len(second.epochs)
    for alone, mine, theirs in zip(one.epochs, first.epochs, second.epochs, strict=True):
        assert len(alone) == one.num_train == len(mine) + len(theirs)
        assert Counter(mine + theirs) == Counter(alone)
        assert abs(len(mine) - len(theirs)) <= len(alone) // 16
    told = one.metrics[case.metric], first.metrics[case.metric]
    print(f"{case.notebook}: {told[0]:.4f} in one process, {told[1]:.4f} on two ranks")
    assert abs(told[0] - told[1]) <= 0.02
    assert first.metrics == second.metrics
