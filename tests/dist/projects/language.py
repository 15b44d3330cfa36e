# SPDX-License-Identifier: Apache-2.0
"""Projects with sequences: tied weights by tokens, a loss of the model's own, packed sequences, a carried state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR
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
    sgd,
    state_of,
    update,
)

VOCABULARY, LENGTH, IGNORED = 13, 8, -100
TOKENS = draw_integers(1, VOCABULARY, NUM_SAMPLES, LENGTH)
LENGTHS = draw_integers(2, LENGTH + 1, NUM_SAMPLES, seed=1)
IS_TOKEN = torch.arange(LENGTH) < LENGTHS[:, None]


class TiedLanguageModel(nn.Module):
    """The matrix of the embedding gives the scores, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens (samples, length) to scores (samples, length, vocabulary)."""
        before = self.embedding(tokens).cumsum(1) / torch.arange(1, tokens.shape[1] + 1, device=tokens.device)[:, None]
        return torch.as_tensor(self.head(torch.tanh(self.inner(before))))


def next_tokens(model: nn.Module, batch: Any) -> Losses:
    """A mean over the tokens that are not padding."""
    tokens, labels = batch
    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    return {"tokens": (loss, int((labels[:, 1:] != IGNORED).sum()))}


class Masked(Dataset[Mapping[str, torch.Tensor]]):
    """Each third token is to be guessed."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> Mapping[str, torch.Tensor]:
        tokens, is_token = TOKENS[number] * IS_TOKEN[number], IS_TOKEN[number]
        is_masked = is_token & (torch.arange(LENGTH) % 3 == number % 3)
        labels = torch.where(is_masked, tokens, IGNORED)
        return {"input_ids": torch.where(is_masked, 1, tokens), "attention_mask": is_token.long(), "labels": labels}


def make_bert() -> nn.Module:
    """BERT of one small layer, without dropout."""
    from transformers import BertConfig, BertForMaskedLM

    sizes: Any = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    rates: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: nn.Module = BertForMaskedLM(
        BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes, **rates)
    )
    return model


def own_loss(model: nn.Module, batch: Any) -> Losses:
    """The model's own loss is a mean over the labels that are not -100."""
    return {"labels": (model(**batch).loss, int((batch["labels"] != IGNORED).sum()))}


class PackedLSTM(nn.Module):
    """Reads sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """x (samples, length, 3), lengths (samples,), to (samples,)."""
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return torch.as_tensor(self.head(self.rnn(packed)[1][0][0]).squeeze(1))


class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sequences without padding, with a number for each."""

    def __init__(self) -> None:
        self.x, self.y = draw(NUM_SAMPLES, LENGTH, 3), draw(NUM_SAMPLES, seed=1)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[number, : LENGTHS[number]], self.y[number]


def pad(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad to the longest sample of the list: the lengths say what counts."""
    x = nn.utils.rnn.pad_sequence([sample for sample, _ in samples], batch_first=True)
    return x, torch.tensor([len(sample) for sample, _ in samples]), torch.stack([y for _, y in samples])


def packed_error(model: nn.Module, batch: Any) -> Losses:
    """A mean over samples."""
    x, lengths, y = batch
    return {"error": functional.mse_loss(model(x, lengths), y)}


class CarriedGRU(nn.Module):
    """Returns its state, which the next batch begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x (streams, steps, 2), state (1, streams, 5)."""
        outputs, state = self.rnn(x, state)
        return self.head(outputs).squeeze(2), state


class CarriedState:
    """Truncated backpropagation through time: batch k has the k-th piece of each of 7 streams, in order."""

    num_pieces = 4

    def __init__(self) -> None:
        self.x = draw(self.num_pieces * GLOBAL_BATCH_SIZE, 5, 2)
        self.y = self.x.sum(2).cumsum(1)

    def by_hand(self) -> Numbers:
        """The state stays with its stream."""
        torch.manual_seed(1)
        model = CarriedGRU()
        optimizer, losses = sgd(model.parameters()), []
        for _ in range(2):
            state = None
            for x, y in zip(
                self.x.view(-1, GLOBAL_BATCH_SIZE, 5, 2), self.y.view(-1, GLOBAL_BATCH_SIZE, 5), strict=True
            ):
                outputs, state = model(x, state)
                loss = functional.mse_loss(outputs, y)
                update(loss, optimizer)
                state = state.detach()
                losses.append(loss.detach())
        return {"losses": losses, "state": state_of(model)}

    def with_loop(self) -> Numbers:
        """A rank has the same streams in each batch, since pieces are contiguous and batches come in order."""
        loop = make_loop()
        torch.manual_seed(1)
        plain = CarriedGRU()
        model, optimizer = loop.prepare(plain, sgd(plain.parameters()))
        loader = loop.loader(TensorDataset(self.x, self.y), global_batch_size=GLOBAL_BATCH_SIZE)
        losses = []
        for _ in loop.epochs(2):
            state = None
            for x, y in loop.batches(loader):
                with loop.accumulate(model):
                    outputs, state = model(x, state)
                    loss = functional.mse_loss(outputs, y)
                    loop.backward(loss)
                state = state.detach()
                losses.append(loop.reduce(loss))
                loop.step(optimizer)
        return {"losses": losses, "state": state_of(model)}


PROJECTS: dict[str, Project] = {
    "tied language model by tokens": Supervised(
        make_model=TiedLanguageModel,
        losses=next_tokens,
        dataset=TensorDataset(TOKENS, torch.where(IS_TOKEN, TOKENS, IGNORED)),
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        make_scheduler=lambda optimizer: OneCycleLR(optimizer, 0.02, total_steps=20),
        accumulate=2,
        max_norm=0.3,
    ),
    "BERT with a loss of its own": Supervised(
        make_model=make_bert, losses=own_loss, dataset=Masked(), count=lambda batch: len(batch["labels"])
    ),
    "packed sequences": Supervised(make_model=PackedLSTM, losses=packed_error, dataset=Sequences(), collate_fn=pad),
    "GRU with a carried state": CarriedState(),
}
