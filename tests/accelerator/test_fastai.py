# SPDX-License-Identifier: Apache-2.0
"""The app "fastai" on emulated accelerators.

How far fastai 2.8 takes a device that it does not know: `default_device()` looks for CUDA and MPS only, so that the
DataLoaders are given the rank's device. `Learner.fit` makes the optimizer before it moves the model, and
`Module.to` replaces the parameters for a device that torch does not know itself (on CUDA they stay the same objects):
so the model is moved when the learner is made. Mixed precision (`to_fp16`) is written for CUDA alone, and not tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from ddpilot import RankError, Session
from ddpilot.module_names import FASTAI_PRELOAD
from tests.accelerator import SITE, environment, why_not
from tests.dist.integrations.test_fastai import MAKE, PRELOAD, run_both
from tests.soak import often

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
    pytest.mark.skipif(find_spec("fastai") is None, reason="fastai is not installed"),
    pytest.mark.timeout(200),
]

ON_DEVICE = """
make_here = make
def make(**options):
    learn = make_here(**options)
    learn.model.to(learn.dls.device)
    return learn
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Two ranks with a device each, whose learners are on it."""
    folder = tmp_path_factory.mktemp("learners")
    assert not hasattr(torch, "emu")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        with Session(2, apps=("fastai",), preload=PRELOAD, output="silent", env=environment(2)) as session:
            make = MAKE.replace('device=torch.device("cpu")', 'device=torch.device("emu", rank)')
            assert make != MAKE
            session.execute(f"where = {str(folder)!r}\n" + make + ON_DEVICE)
            yield session


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """One rank with its tensors on the CPU, where fastai is as it is, from the same rank server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        with Session(1, preload=(*PRELOAD, FASTAI_PRELOAD), output="silent", env=environment(2)) as session:
            session.execute(f"where = {str(tmp_path_factory.mktemp('learners'))!r}\n" + MAKE)
            yield session


@often("", "num_train=17")
@pytest.mark.parametrize("options", ["", "num_train=17", "has_unused=True"])
def test_fit_on_devices_gives_the_numbers_of_one_process_on_the_cpu(one: Session, two: Session, options: str) -> None:
    """Losses of every step, metrics of every epoch and final weights, also where a rank has no sample in a batch."""
    cell = (
        f"learn = make({options})\nlearn.fit_one_cycle(2, 0.05)\nlosses, values = numbers(learn)\n"
        "w = [value.cpu() for value in weights(learn)]"
    )
    run_both(one, two, cell, "losses", "values", "w")
    places = two.pull("sorted({str(each.device) for each in learn.model.parameters()})")
    assert places == [["emu:0"], ["emu:1"]]


def test_predictions_and_validation_are_those_of_one_process(one: Session, two: Session) -> None:
    """Of all samples, in their order, on every rank."""
    cell = (
        "learn = make()\nlearn.fit(1, 0.05)\npreds, targets = [each.cpu() for each in learn.get_preds()]\n"
        "loss = float(learn.validate()[0])"
    )
    run_both(one, two, cell, "preds", "targets", "loss")


def test_a_fit_that_fails_on_one_rank_leaves_a_session_that_trains_on(two: Session) -> None:
    """The other rank waits for its device then; a fit after it trains on all samples."""
    with pytest.raises(RankError, match="(?s)rank 1 raised ValueError: .*bad sample"):
        two.execute(
            "class Fails(Callback):\n"
            "    def after_backward(self):\n"
            "        if rank == 1 and self.train_iter == 2: raise ValueError('bad sample')\n"
            "learn = make(); learn.add_cb(Fails()); learn.fit(1, 0.05)"
        )
    two.execute("learn = make(); learn.fit(1, 0.05); last = float(learn.recorder.losses[-1])")
    losses = two.pull("last")
    assert losses[0] == losses[1]
    assert math.isfinite(losses[0])
