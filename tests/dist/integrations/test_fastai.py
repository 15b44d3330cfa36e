# SPDX-License-Identifier: Apache-2.0
"""The app "fastai" on real ranks: a Learner's numbers are those of one process, and mistakes are survived."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpilot import RankError, Session
from ddpilot.module_names import FASTAI_PRELOAD

PRELOAD = (FASTAI_PRELOAD, "torch._dynamo", "fastai.basics", "fastai.callback.all", "fastai.metrics")
"""Imported once for all ranks here: 3 s each. That a rank imports fastai by itself: tests/notebook/apps."""
MAKE = """
from fastai.basics import *
from fastai.callback.all import *
from fastai.metrics import R2Score

class Seen(Callback):
    "Notes which samples a step was taken on: the first number of each is its name."
    order = 2000
    def before_fit(self): self.names = []
    def after_pred(self):
        share = getattr(self.dl, "own_size", 1)
        if self.training and share: self.names.extend(int(name) for name in self.xb[0][:, 0])

class Items(list):
    def new_empty(self): return Items()

class Net(Module):
    def __init__(self, has_unused): self.body, self.extra = nn.Linear(3, 6), nn.Linear(3, 6) if has_unused else None
    def forward(self, x): return torch.tanh(self.body(x[:, 1:])).sum(1, keepdim=True)

def make(num_train=30, num_valid=11, bs=8, has_unused=False, loader=DataLoader, **options):
    set_seed(3)
    x = torch.cat([torch.arange(num_train + num_valid)[:, None], torch.randn(num_train + num_valid, 3)], dim=1)
    items = Items(zip(x, x[:, 1:].prod(1, keepdim=True)))
    train = loader(Items(items[:num_train]), batch_size=bs, shuffle=True)
    dls = DataLoaders(train, loader(Items(items[num_train:]), batch_size=bs), device=torch.device("cpu"))
    learn = Learner(dls, Net(has_unused), loss_func=MSELossFlat(), metrics=[mae, R2Score()], cbs=Seen(), **options)
    learn.path = Path(where)
    return learn

def weights(learn): return [value.clone() for value in learn.model.state_dict().values()]
def numbers(learn):
    return [float(loss) for loss in learn.recorder.losses], [list(map(float, row)) for row in learn.recorder.values]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where learners keep their files."""
    return tmp_path_factory.mktemp("learners")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Session]:
    """Two ranks with the app."""
    with Session(2, apps=("fastai",), preload=PRELOAD, output="silent") as session:
        session.execute(f"where = {str(folder / 'two')!r}\n" + MAKE)
        yield session


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Session]:
    """One rank, where fastai is as it is, from the same rank server."""
    with Session(1, preload=(*PRELOAD, FASTAI_PRELOAD), output="silent") as session:
        session.execute(f"where = {str(folder / 'one')!r}\n" + MAKE)
        yield session


def same(got: Any, wanted: Any) -> Any:
    """`got`, to be compared with nested lists of tensors or numbers that may differ by the order of a sum."""
    if isinstance(wanted, (list, tuple)):
        return len(got) == len(wanted) and all(same(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))
    apart = float(abs(got - wanted).max() if hasattr(wanted, "shape") else abs(got - wanted))
    return apart < 2e-5 or (got != got and wanted != wanted)


def run_both(one: Session, two: Session, cell: str, *names: str) -> None:
    """Run `cell` in both sessions; afterwards each of `names` has to be the same everywhere."""
    one.execute(cell)
    two.execute(cell)
    for name in names:
        wanted = one.pull(name, rank=0)
        for rank, got in enumerate(two.pull(name)):
            assert same(got, wanted), f"{name} on rank {rank}: {got}, and in one process: {wanted}"


@pytest.mark.parametrize(
    "options",
    [
        "",
        "num_train=17",  # the last batch has one sample: one of the ranks has none and borrows one
        "has_unused=True",
        "num_train=24, num_valid=1",
        "loader=torch.utils.data.DataLoader",
        "bs=7, metrics_only_averaged=True",
    ],
)
def test_fit_gives_the_numbers_of_one_process(one: Session, two: Session, options: str) -> None:
    """Losses of every step, metrics of every epoch and final weights, with ragged batches and unequal shares too."""
    options = options.replace("metrics_only_averaged=True", "")
    cell = f"learn = make({options})\nlearn.fit_one_cycle(3, 0.05)\nlosses, values = numbers(learn); w = weights(learn)"
    run_both(one, two, cell, "losses", "values", "w")
    seen = two.pull("learn.seen.names")
    assert sorted(seen[0] + seen[1]) == sorted(one.pull("learn.seen.names", rank=0))


def test_fit_trains_on_each_sample_once_per_epoch(two: Session) -> None:
    """No sample is padded, dropped or given to two ranks, for any size of the last batch."""
    for num_train in (17, 30, 32):
        two.execute(f"learn = make(num_train={num_train}); learn.fit(2, 0.01)")
        seen = two.pull("learn.seen.names")
        assert sorted(seen[0] + seen[1]) == sorted([*range(num_train)] * 2)
        assert abs(len(seen[0]) - len(seen[1])) <= 2 * num_train // 8 + 2


def test_a_second_fit_gives_the_numbers_of_one_process(one: Session, two: Session) -> None:
    """Also in the same order; and later draws on all ranks equal those of one process."""
    cell = (
        "learn = make()\nfor _ in range(2): learn.fit(1, 0.05)\nlosses, values = numbers(learn); w = weights(learn)\n"
        "drawn = [torch.rand(1).item(), random.random(), float(np.random.rand())]"
    )
    run_both(one, two, cell, "losses", "values", "w", "drawn")


def test_a_seeded_fit_gives_the_same_noise_in_every_run(two: Session) -> None:
    """Seeds of ranks above 0 follow from the state alone, also after a fit that failed; ranks have their own."""
    two.execute(
        "class Noise(Callback):\n"
        "    fails = False\n"
        "    def before_fit(self): self.drawn = []\n"
        "    def before_batch(self): self.drawn.append([torch.rand(1).item(), random.random(), np.random.rand()])\n"
        "    def after_batch(self):\n"
        "        if self.fails: raise ValueError('as it happens')\n"
        "kept, found = [], []\n"
        "for fails in (False, False, True, True):\n"
        "    learn = make(); learn.add_cb(Noise()); learn.noise.fails = fails; set_seed(5)\n"
        "    kept.append(torch.get_rng_state())\n"  # so that no two states lie at one address
        "    try: learn.fit(2, 0.05)\n"
        "    except ValueError: pass\n"
        "    found.append([learn.noise.drawn, torch.rand(1).item()])"
    )
    first, second = two.pull("found")
    assert first[0] == first[1]
    assert first[2] == first[3]
    assert second[0] == second[1]
    assert second[2] == second[3]
    assert first[0][0] != second[0][0]
    assert [one[1] for one in first] == [one[1] for one in second]


def test_fit_accumulates_gradients_as_one_process_does(one: Session, two: Session) -> None:
    """The accumulation counts the samples of all ranks, so steps happen at the same batches and are equal."""
    cell = "learn = make(num_train=33, bs=7)\nlearn.fit(2, 0.05, cbs=GradientAccumulation(20)); w = weights(learn)"
    run_both(one, two, cell, "w")


def test_validate_and_get_preds_count_every_sample_once_in_order(one: Session, two: Session) -> None:
    """Metrics, predictions, targets, losses and inputs are those of one process, on every rank."""
    cell = (
        "learn = make(); learn.fit(1, 0.05)\nfinal = [float(v) for v in learn.validate()]\n"
        "inputs, preds, targets, losses = learn.get_preds(with_input=True, with_loss=True)\n"
        "of_train = learn.get_preds(ds_idx=0)[0]\n"
        "few = learn.get_preds(dl=learn.dls.test_dl([learn.dls.valid_ds[0]])) if hasattr(learn.dls, 'test_dl') else []"
    )
    run_both(one, two, cell, "final", "inputs", "preds", "targets", "losses", "of_train")


def test_lr_find_suggests_the_same_on_all_ranks_and_restores_the_weights(one: Session, two: Session) -> None:
    """It saves and loads, and stops by the loss: each rank does so on its own, at the same step."""
    cell = (
        "learn = make(num_train=64); before = weights(learn)\n"
        "suggested = learn.lr_find(num_it=30, show_plot=False).valley\nafter = weights(learn)"
    )
    run_both(one, two, cell, "suggested", "before", "after")
    assert same(two.pull("after", rank=1), two.pull("before", rank=1))


def test_files_are_written_once_and_read_by_all(two: Session, folder: Path) -> None:
    """Save, load and export from all ranks; exported files do not need ddpilot."""
    two.execute(
        "learn = make(); learn.fit(1, 0.05); learn.save('kept'); w = weights(learn)\n"
        "learn.fit(1, 0.05); learn.load('kept'); again = weights(learn); learn.export('all.pkl')\ngroup.barrier()"
    )
    assert same(two.pull("again", rank=1), two.pull("w", rank=0))
    assert b"ddpilot" not in (folder / "two" / "all.pkl").read_bytes()


def test_a_failed_fit_leaves_a_learner_that_fits(two: Session) -> None:
    """One rank fails in the middle of a step; in the next fit weights and optimizer agree, and nothing is left over."""
    two.execute(
        "class Fails(Callback):\n    def after_pred(self):\n        if rank == 1 and self.train_iter == 5: 1 / 0\n"
        "learn = make(); learn.fit(1, 0.05)"
    )
    with pytest.raises(RankError, match="ZeroDivisionError"):
        two.execute("learn.fit(2, 0.05, cbs=Fails())")
    two.execute("kind, names = type(learn.model).__name__, [cb.name for cb in learn.cbs]; learn.fit(1, 0.05)")
    assert two.pull("kind") == ["Net", "Net"]
    assert two.pull("names", rank=0) == ["train_eval", "recorder", "cast_to_tensor", "progress", "seen"]
    two.execute("w = weights(learn); steps = [state['sqr_avg'] for state in learn.opt.state_dict()['state']]")
    for name in ("w", "steps"):
        first, second = two.pull(name)
        assert all(bool((mine == theirs).all()) for mine, theirs in zip(first, second, strict=True)), name


def test_one_ranks_cell_evaluates_alone_and_must_not_fit(two: Session) -> None:
    """In a cell on rank 0 everything but training works as in one process."""
    two.execute("learn = make(); learn.fit(1, 0.05); value = float(learn.validate()[0])")
    two.execute(
        "alone = float(learn.validate()[0]); learn.get_preds(); learn.save('alone'); learn.load('alone')", ranks=[0]
    )
    assert two.pull("alone", rank=0) == pytest.approx(two.pull("value", rank=0))
    with pytest.raises(RankError, match="this cell does not run on all ranks"):
        two.execute("learn.fit(1, 0.05)", ranks=[0])


def test_fit_refuses_data_that_differ_between_ranks(two: Session) -> None:
    """A different split on each rank would train on validation samples of other ranks."""
    with pytest.raises(RankError, match="its data loader 0 differs between the ranks") as raised:
        two.execute("learn = make(num_train=30 + rank); learn.fit(1, 0.05)")
    assert "30 samples" in str(raised.value)
    assert "31 samples" in str(raised.value)


def test_ranks_draw_the_same_between_fits_and_their_own_noise_inside(two: Session) -> None:
    """An unseeded split is one split; dropout is not the same on all ranks."""
    two.execute(
        "class Noise(Callback):\n    def before_batch(self): self.learn.drawn = float(torch.rand(()))\n"
        "before = float(torch.rand(())), random.random(), float(np.random.rand())\n"
        "learn = make(); learn.fit(1, 0.05, cbs=Noise()); inside = learn.drawn\n"
        "after = float(torch.rand(())), random.random(), float(np.random.rand())"
    )
    for name, is_equal in (("before", True), ("inside", False), ("after", True)):
        first, second = two.pull(name)
        assert (first == second) is is_equal, name


def test_progress_is_shown_by_rank_zero_alone(two: Session) -> None:
    """The other ranks count, and show nothing."""
    two.execute(
        "learn = make(); learn.fit(1, 0.05, cbs=CSVLogger()); bar = type(learn.progress.pbar).__name__\n"
        "group.barrier()\n"
        "lines = (learn.path / 'history.csv').read_text().splitlines()"
    )
    bars = two.pull("bar")
    assert bars[0] != "SilentBar"
    assert bars[1] == "SilentBar"
    assert len(two.pull("lines", rank=1)) == 2
