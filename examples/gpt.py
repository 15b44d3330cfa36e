# SPDX-License-Identifier: Apache-2.0
"""A small GPT that learns to write Python from the source text of the standard library, which is on every machine.

    python examples/gpt.py --epochs 2
    ddpilot run examples/gpt.py -n 2 -- --epochs 2 --checkpoint-dir ckpt
    results = ddpilot.launch(gpt.train, 2, nproc_per_node=2)  # in a notebook here, after `import gpt`

Gradients are accumulated, matrices are multiplied in bfloat16, and each character counts the same: the last piece of a
file is shorter than the others and padded, so batches have unequal numbers of characters, and `count=` says how many.
With a checkpoint directory the run goes on where it was stopped or killed, on as many ranks as there are then.
On a CPU an epoch takes a minute or more; `--files 8` has a tenth of the text.

Shapes: B pieces in the batch of one rank, T characters in a piece, D numbers for a character.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import TensorDataset

import ddpilot

CONTEXT = 64
VOCABULARY = 256
"""The bytes of a text."""
PADDING = -100
"""What `cross_entropy` leaves out."""


def load_texts(num_files: int) -> tuple[TensorDataset, TensorDataset]:
    """Pieces of `num_files` modules of the standard library to train on, and of every eighth of them to test with."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:num_files]
    held_out = paths[::8]
    return cut_pieces([path for path in paths if path not in held_out]), cut_pieces(held_out)


def cut_pieces(paths: list[Path]) -> TensorDataset:
    """Characters (N, T) and those that follow them (N, T), with `PADDING` behind the end of a file."""
    inputs, targets = [], []
    for path in paths:
        text = torch.tensor(list(path.read_bytes()))
        for piece, following in zip(torch.split(text[:-1], CONTEXT), torch.split(text[1:], CONTEXT), strict=True):
            missing = CONTEXT - len(piece)
            inputs.append(nn.functional.pad(piece, (0, missing)))
            targets.append(nn.functional.pad(following, (0, missing), value=PADDING))
    return TensorDataset(torch.stack(inputs), torch.stack(targets))


class Block(nn.Module):
    """Attention to what came before, then two layers for each character."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """x_BTD, and so is the result."""
        parts_BTD = self.qkv(self.norm1(x_BTD)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts_BTD)
        seen_BTD = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.out(seen_BTD)
        return torch.as_tensor(x_BTD + self.mlp(self.norm2(x_BTD)))


class GPT(nn.Module):
    """Characters (B, T) to the scores of what follows each (B, T, VOCABULARY)."""

    def __init__(self, width: int = 64, num_blocks: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, text_BT: Tensor) -> Tensor:
        """text_BT: whole numbers from 0 to 255."""
        places_T = torch.arange(text_BT.shape[1], device=text_BT.device)
        x_BTD = self.characters(text_BT) + self.places(places_T)
        return torch.as_tensor(self.head(self.norm(self.blocks(x_BTD))))

    @torch.no_grad()
    def write(self, prompt: str, num_characters: int) -> str:
        """`prompt` with as many characters more, each the likeliest."""
        device = self.head.weight.device
        text_T = torch.tensor(list(prompt.encode()), device=device)
        for _ in range(num_characters):
            following = self(text_T[None, -CONTEXT:])[0, -1].argmax()
            text_T = torch.cat([text_T, following[None]])
        text = bytes(text_T.tolist()).decode(errors="replace")
        return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)


def loss_fn(scores: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean over the characters that there are."""
    return cross_entropy(scores.flatten(0, 1), targets_BT.flatten(), ignore_index=PADDING)


def count_and_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """For each piece: how many characters it has, and the sum of their losses."""
    text_BT, targets_BT = batch
    losses_BT = cross_entropy(model(text_BT).transpose(1, 2), targets_BT, ignore_index=PADDING, reduction="none")
    return (targets_BT != PADDING).sum(1), losses_BT.sum(1)


def train(
    epochs: int = 2,
    num_files: int = 80,
    global_batch_size: int = 32,
    checkpoint_dir: str | Path | None = None,
    precision: Any = "bf16",
) -> dict[str, Any]:
    """Train; losses of each batch, the loss of a character of files that were held out, weights. Collective."""
    save_every_s = 60 if checkpoint_dir else None
    loop = ddpilot.Loop(
        seed=0, accumulate=2, precision=precision, checkpoint_dir=checkpoint_dir, save_every_s=save_every_s
    )
    train_data, test_data = load_texts(num_files)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ddp_model, optimizer = loop.prepare(model, optimizer)
    loader = loop.loader(train_data, global_batch_size=global_batch_size, shuffle=True)
    losses = []
    for epoch in loop.epochs(epochs):
        for text_BT, targets_BT in loop.batches(loader):
            num_characters = int((targets_BT != PADDING).sum())
            with loop.accumulate(ddp_model):
                loss = loss_fn(ddp_model(text_BT), targets_BT)
                loop.backward(loss, count=num_characters)
            loop.clip_grad_norm_(model.parameters(), 1.0)
            loop.step(optimizer)
            losses.append(loop.reduce(loss, count=num_characters).item())
        loop.print(f"epoch {epoch + 1}/{epochs}, {loop.num_updates} updates: loss {losses[-1]:.4f}", flush=True)
    sums = {"characters": lambda count, loss: count, "loss": lambda count, loss: loss}
    test_loader = loop.loader(test_data, global_batch_size=256)
    means = loop.evaluate(model, test_loader, sums, forward=count_and_loss)
    test_loss = means["loss"] / means["characters"]
    loop.print(f"a character of a file not seen: loss {test_loss:.4f}, {loop.world_size} rank(s)", flush=True)
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    return {"losses": losses, "test_loss": test_loss, "num_updates": loop.num_updates, "weights": weights}


def main() -> None:
    """Read the options of the command line, train, and write a few lines of Python."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the source text of Python's standard library.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--files", type=int, default=80, help="modules of the standard library, of about 160")
    parser.add_argument("--checkpoint-dir", type=Path, help="the run goes on from what is there")
    options = parser.parse_args()
    learnt = train(options.epochs, options.files, checkpoint_dir=options.checkpoint_dir)
    if ddpilot.topology().rank == 0:
        model = GPT()
        model.load_state_dict(learnt["weights"])
        print(model.write("import os\n\ndef ", 120), flush=True)


if __name__ == "__main__":
    main()
