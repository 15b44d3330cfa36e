# SPDX-License-Identifier: Apache-2.0
"""Projects by their losses: contrastive, several tasks, distillation, a slow teacher, graphs, a latent variable."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from tests.dist.projects.supervised import (
    GLOBAL_BATCH_SIZE,
    NUM_SAMPLES,
    Losses,
    Numbers,
    Project,
    Supervised,
    draw,
    draw_integers,
    make_loop,
    order_of,
    sgd,
    state_of,
    update,
)

X, Y = draw(NUM_SAMPLES, 6), draw(NUM_SAMPLES, 1, seed=1)
VIEWS = X + 0.1 * draw(NUM_SAMPLES, 6, seed=2)
CLASSES = draw_integers(-1, 3, NUM_SAMPLES, seed=3)
"""-1: not labelled."""


class Contrastive:
    """InfoNCE: the negatives of a sample are all other samples of the global batch."""

    @staticmethod
    def embed(model: nn.Module, x: torch.Tensor, views: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unit vectors of both, from one forward."""
        ours, theirs = functional.normalize(model(torch.cat([x, views])), dim=1).chunk(2)
        return ours, theirs

    def by_hand(self) -> Numbers:
        """Scores of the whole batch."""
        torch.manual_seed(1)
        model = nn.Linear(6, 4)
        optimizer, losses = sgd(model.parameters()), []
        for epoch in range(3):
            for numbers in order_of(epoch):
                ours, theirs = self.embed(model, X[numbers], VIEWS[numbers])
                loss = functional.cross_entropy(ours @ theirs.T / 0.2, torch.arange(len(numbers)))
                update(loss, optimizer)
                losses.append(loss.detach())
        return {"losses": losses, "state": state_of(model)}

    def with_loop(self) -> Numbers:
        """The views of all ranks are gathered, with their gradients."""
        loop = make_loop()
        torch.manual_seed(1)
        plain = nn.Linear(6, 4)
        model, optimizer = loop.prepare(plain, sgd(plain.parameters()))
        loader = loop.loader(TensorDataset(X, VIEWS), global_batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
        losses = []
        for _ in loop.epochs(3):
            for x, views in loop.batches(loader):
                with loop.accumulate(model):
                    ours, theirs = self.embed(model, x, views)
                    everyone, start = loop.gather_batch(theirs)
                    loss = functional.cross_entropy(ours @ everyone.T / 0.2, torch.arange(start, start + len(x)))
                    loop.backward(loss)
                losses.append(loop.reduce(loss))
                loop.step(optimizer)
        return {"losses": losses, "state": state_of(model)}


class TwoHeads(nn.Module):
    """A number and three scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.number, self.scores = nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (samples, 6)."""
        features = torch.tanh(self.body(x))
        return self.number(features), self.scores(features)


def two_tasks(model: nn.Module, batch: Any) -> Losses:
    """One is a mean over all samples, the other one over those that have a label."""
    x, y, classes = batch
    number, scores = model(x)
    num_labelled = int((classes >= 0).sum())
    total = functional.cross_entropy(scores, classes, ignore_index=-1, reduction="sum")
    return {"number": functional.mse_loss(number, y), "classes": (total / max(num_labelled, 1), num_labelled)}


TEACHER = nn.Linear(6, 4).requires_grad_(False).double()
TEACHER.load_state_dict({"weight": draw(4, 6, seed=7), "bias": draw(4, seed=8)})


def distilled(model: nn.Module, batch: Any) -> Losses:
    """The teacher is in no optimizer and no DDP."""
    (x,) = batch
    ours, theirs = model(x).log_softmax(1), TEACHER(x).log_softmax(1)
    return {"divergence": functional.kl_div(ours, theirs, log_target=True, reduction="batchmean")}


class SlowTeacher(nn.Module):
    """A copy of the model follows it slowly and says what it is to predict."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor, views: torch.Tensor) -> torch.Tensor:
        """(samples,): how far the model's vector of a sample is from the teacher's of the other view."""
        return 2 - 2 * functional.cosine_similarity(self.model(x), self.teacher(views))

    @torch.no_grad()
    def follow(self) -> None:
        """A tenth of the way."""
        for theirs, ours in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            theirs.lerp_(ours, 0.1)


def follow(model: nn.Module) -> None:
    """After an update."""
    assert isinstance(model, SlowTeacher)
    model.follow()


class Graphs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Nodes in a ring, two to five of them."""

    def __init__(self) -> None:
        self.sizes, self.nodes = draw_integers(2, 6, NUM_SAMPLES), draw(NUM_SAMPLES, 5, 3)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        nodes = self.nodes[number, : self.sizes[number]]
        return nodes, nodes.sum(1) + nodes.roll(1, 0).sum(1)


def join_graphs(graphs: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nodes of all graphs, for each the number of the one before it in its ring, and what is to be predicted."""
    before, start = [], 0
    for nodes, _ in graphs:
        before.append(start + torch.arange(len(nodes)).roll(1))
        start += len(nodes)
    return torch.cat([nodes for nodes, _ in graphs]), torch.cat(before), torch.cat([y for _, y in graphs])


class GraphNet(nn.Module):
    """One exchange between neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, nodes: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """nodes (nodes, 3), before (nodes,)."""
        return torch.as_tensor((self.own(nodes) + self.others(nodes[before])).squeeze(1))


def node_error(model: nn.Module, batch: Any) -> Losses:
    """A mean over nodes."""
    nodes, before, y = batch
    return {"nodes": (functional.mse_loss(model(nodes, before), y), len(nodes))}


class Annealed(nn.Module):
    """A buffer counts the forward passes of training, and what is computed becomes sharper with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.num_steps = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (samples, 6)."""
        if self.training:
            self.num_steps.add_(1)
        return torch.as_tensor(self.last(torch.tanh(self.first(x) / (1 + 0.3 * self.num_steps))))


PROJECTS: dict[str, Project] = {
    "contrastive": Contrastive(),
    "two tasks with counts of their own": Supervised(
        make_model=TwoHeads, losses=two_tasks, dataset=TensorDataset(X, Y, CLASSES), max_norm=0.5
    ),
    "distillation": Supervised(make_model=lambda: nn.Linear(6, 4), losses=distilled, dataset=TensorDataset(X)),
    "slow teacher": Supervised(
        make_model=SlowTeacher,
        losses=lambda model, batch: {"distance": model(*batch).mean()},
        dataset=TensorDataset(X, VIEWS),
        make_optimizer=lambda parameters: sgd([p for p in parameters if p.requires_grad]),
        after_update=follow,
    ),
    "annealed by a counter": Supervised(
        make_model=Annealed,
        losses=lambda model, batch: {"error": functional.mse_loss(model(batch[0]), batch[1])},
        dataset=TensorDataset(X, Y),
        num_epochs=5,
    ),
    "graphs by nodes": Supervised(
        make_model=GraphNet, losses=node_error, dataset=Graphs(), collate_fn=join_graphs, max_norm=1.0
    ),
}
