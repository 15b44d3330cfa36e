# SPDX-License-Identifier: Apache-2.0
"""The app "lightning" on real ranks: a Trainer as it stands in a notebook for one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpilot import RankError, Session
from tests.conftest import TORCHMETRICS_ALONE

SET_UP = """
import logging, warnings
warnings.simplefilter("ignore")
import torch, lightning, pytorch_lightning
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(32, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
             enable_model_summary=False)
def make(library):
    class Net(library.LightningModule):
        def __init__(self): super().__init__(); self.layer = torch.nn.Linear(4, 1)
        def training_step(self, batch, _):
            if self.current_epoch == getattr(self, "fails_at", None) and self.global_rank == 1: 1 / 0
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        def validation_step(self, batch, _):
            self.log("valid", (self.layer(batch[0]) - batch[1]).abs().mean(), sync_dist=True)
        def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
    return Net()
def loader(): return DataLoader(data, batch_size=4)
"""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Two ranks with the app."""
    with Session(2, apps=("lightning",), output="silent", env=TORCHMETRICS_ALONE) as session:
        session.execute(SET_UP)
        yield session


@pytest.mark.parametrize("library", ["lightning", "pytorch_lightning"])
def test_a_trainer_uses_all_ranks_in_cell_after_cell(session: Session, library: str) -> None:
    """Fit, validate and a second fit, with one process's arguments, in a group that the session keeps using."""
    session.execute(
        f"net = make({library}); trainer = {library}.Trainer(max_epochs=2, **quiet); trainer.fit(net, loader())\n"
        "size, steps = trainer.world_size, trainer.global_step"
    )
    assert session.pull("size") == [2, 2]
    assert session.pull("steps") == [8, 8]  # 32 samples, 4 at a time on each of 2 ranks, twice
    session.execute("valid = trainer.validate(net, loader(), verbose=False)[0]['valid']")
    first, second = session.pull("valid")
    assert first == second
    session.execute(f"{library}.Trainer(max_epochs=1, devices=1, strategy='ddp_notebook', **quiet).fit(net, loader())")
    session.execute("w = net.layer.weight.detach().clone(); total = group.all_reduce(torch.ones(1)).item()")
    first, second = session.pull("w")
    assert bool((first == second).all())
    assert session.pull("total") == [2.0, 2.0]


def test_a_failed_fit_leaves_a_group_for_the_next_one(session: Session) -> None:
    """One rank raises in the second epoch; the next Trainer trains."""
    session.execute("net = make(lightning); net.fails_at = 1")
    with pytest.raises(RankError, match="ZeroDivisionError"):
        session.execute("lightning.Trainer(max_epochs=3, **quiet).fit(net, loader())")
    session.execute(
        "net.fails_at = None; trainer = lightning.Trainer(max_epochs=1, **quiet); trainer.fit(net, loader())"
    )
    assert session.pull("trainer.global_step") == [4, 4]


def test_fabric_uses_all_ranks(session: Session) -> None:
    """Without arguments, as in a notebook for one process."""
    session.execute("from lightning.fabric import Fabric\nfabric = Fabric(accelerator='cpu'); fabric.launch()")
    assert session.pull("fabric.world_size, fabric.global_rank") == [(2, 0), (2, 1)]


def test_the_strategy_starts_nothing_in_a_session(session: Session) -> None:
    """A notebook with strategy="ddpilot" also runs on the session's ranks."""
    session.execute("net = make(lightning); trainer = lightning.Trainer(max_epochs=1, strategy='ddpilot', **quiet)")
    session.execute("trainer.fit(net, loader())")
    assert (
        session.pull("trainer.strategy.launcher is None, trainer.world_size, trainer.global_step") == [(True, 2, 4)] * 2
    )
