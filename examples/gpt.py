# SPDX-License-Identifier: Apache-2.0
"""A small GPT that learns to write Python from the source text of the standard library, which is on every machine.

    python examples/gpt.py --max-updates 200
    ddpilot run examples/gpt.py -n 2 -- --max-updates 200 --checkpoint-dir ckpt
    results = ddpilot.launch(gpt.train, 200, nproc_per_node=2)  # in a notebook here, after `import gpt`

The text is a stream of shards, one for each file, so a run is counted in updates: it ends, validates and saves after so
many. Parameters, gradients and the optimizer's state are sharded over the ranks (FSDP2), matrices are multiplied in
bfloat16, and gradients are accumulated. Each character counts the same: the last piece of a file is shorter than the
others and padded, so batches have unequal numbers of characters, and `count=` says how many. With a checkpoint
directory the run resumes where it was stopped or killed, on as many ranks as there are then, with the same numbers.

Shapes: B pieces in the batch of one rank, T characters in a piece, D numbers for a character.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import ddpilot

CONTEXT = 64
VOCABULARY = 256
"""The bytes of a text."""
PADDING = -100
"""What `cross_entropy` leaves out."""


class Sources(ddpilot.ShardedDataset):
    """The text of files in pieces, a file a shard: characters (T,) and those that follow them, `PADDING` at the end."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.num_shards = len(paths)

    def open(self, shard: int, skip: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The pieces of a file from piece `skip` on."""
        text = torch.tensor(list(self.paths[shard].read_bytes()))
        for start in range(skip * CONTEXT, len(text) - 1, CONTEXT):
            piece, following = text[start : start + CONTEXT], text[start + 1 : start + CONTEXT + 1]
            piece = piece[: len(following)]
            missing = CONTEXT - len(piece)
            yield nn.functional.pad(piece, (0, missing)), nn.functional.pad(following, (0, missing), value=PADDING)

    def num_samples(self, shard: int) -> int:
        """The number of pieces of a file."""
        return math.ceil((self.paths[shard].stat().st_size - 1) / CONTEXT)

    def describe(self, shard: int) -> str:
        """The name of a file."""
        return self.paths[shard].name


def find_sources(num_files: int) -> tuple[Sources, Sources]:
    """`num_files` modules of the standard library to train on, and every eighth of them to validate with."""
    paths = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if path.stat().st_size > 1]
    held_out = paths[:num_files][::8]
    return Sources([path for path in paths[:num_files] if path not in held_out]), Sources(held_out)


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
    max_updates: int = 200,
    validate_every: int = 50,
    num_files: int = 80,
    global_batch_size: int = 32,
    checkpoint_dir: str | Path | None = None,
    save_every: str = "50 updates",
    precision: Any = "bf16",
    shard: Any = "parameters",
) -> dict[str, Any]:
    """Train; losses of each batch, those of a character of other files by update, and weights. Collective."""
    loop = ddpilot.Loop(
        seed=0,
        accumulate=2,
        precision=precision,
        checkpoint_dir=checkpoint_dir,
        save_every=save_every if checkpoint_dir else None,
    )
    train_data, val_data = find_sources(num_files)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = loop.prepare(model, optimizer, shard=shard)
    loader = loop.loader(train_data, global_batch_size=global_batch_size, shuffle=True)
    val_loader = loop.loader(val_data, global_batch_size=256)
    sums = {"characters": lambda count, loss: count, "loss": lambda count, loss: loss}
    losses, val_losses = [], {}
    for _ in loop.epochs(max_updates=max_updates):
        for text_BT, targets_BT in loop.batches(loader):
            num_characters = int((targets_BT != PADDING).sum())
            with loop.accumulate(model):
                loss = loss_fn(model(text_BT), targets_BT)
                loop.backward(loss, count=num_characters)
            loop.clip_grad_norm_(model.parameters(), 1.0)
            is_update = loop.step(optimizer)
            losses.append(loop.reduce(loss.detach(), count=num_characters).item())
            if is_update and loop.num_updates % validate_every == 0:
                means = loop.evaluate(model, val_loader, sums, forward=count_and_loss)
                val_losses[loop.num_updates] = means["loss"] / means["characters"]
                loop.print(
                    f"{loop.num_updates} updates: loss {losses[-1]:.4f}, "
                    f"a character of a file not seen {val_losses[loop.num_updates]:.4f}",
                    flush=True,
                )
    weights = ddpilot.full_state(model)
    return {"losses": losses, "val_losses": val_losses, "num_updates": loop.num_updates, "weights": weights}


def main() -> None:
    """Read the options of the command line, train, and write a few lines of Python."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the source text of Python's standard library.")
    parser.add_argument("--max-updates", type=int, default=200)
    parser.add_argument("--validate-every", type=int, default=50)
    parser.add_argument("--files", type=int, default=80, help="modules of the standard library, of about 160")
    parser.add_argument("--checkpoint-dir", type=Path, help="the run resumes from the latest checkpoint there")
    options = parser.parse_args()
    learnt = train(options.max_updates, options.validate_every, options.files, checkpoint_dir=options.checkpoint_dir)
    if ddpilot.topology().rank == 0:
        model = GPT()
        model.load_state_dict(learnt["weights"])
        print(model.write("import os\n\ndef ", 120), flush=True)


if __name__ == "__main__":
    main()
