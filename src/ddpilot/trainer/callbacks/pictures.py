# SPDX-License-Identifier: Apache-2.0
"""`Pictures`: plots the model's predictions for a fixed set of samples after epochs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from ddpilot.errors import LoopError
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.run import Run
from ddpilot.training.options import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[["Figure", Any, Any], None]
"""Draws a batch and the model's output for it on an empty figure."""


class Pictures(Callback):
    """Plot predictions for some samples of `dataset` to `folder`/epoch-0000.png and so on, on rank 0.

    The model, or its EMA, is called in eval mode with the batch without its last element, the target.

    - `samples`: indices (default: the first 8), read and collated once.
    - `every`: epochs between pictures (default 1), or "500 updates", for update-00000500.png and so on.
    - `draw(figure, batch, output)`: draws on an empty matplotlib figure, from tensors on the CPU. The default draws
      images of shape (1 or 3, height, width) or (height, width), titled with the predicted class; a wrong class is in
      red, with the target.

    Raises LoopError for indices out of range, and, on all ranks, if matplotlib is not installed or if the default
    cannot draw the samples.
    """

    def __init__(
        self,
        dataset: Any,
        folder: str | os.PathLike[str] = "pictures",
        *,
        samples: Sequence[int] | None = None,
        every: int | str = 1,
        draw: Draw | None = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        samples = range(min(8, len(dataset))) if samples is None else samples
        if beyond := [number for number in samples if not 0 <= number < len(dataset)]:
            found = f"`samples` has {', '.join(map(str, beyond))}, and the dataset {len(dataset)} samples"
            raise LoopError("making Pictures", found=found, fix="Give indices of samples, from 0.")
        self._batch = collate_fn([dataset[number] for number in samples])
        self._folder = Path(folder)
        self._every = Interval.parse(every, did="making Pictures", name="every", unit="epochs")
        self._draw = draw or draw_classes
        self.paths: list[str] = []
        """Paths of the pictures drawn."""

    def on_fit_start(self, run: Run) -> None:
        try:
            import matplotlib.figure  # noqa: F401  (fail before the first epoch)
        except ImportError as error:
            fix = "pip install matplotlib, or leave Pictures out."
            raise LoopError("drawing predictions", found=f"{error}", fix=fix, rank=run.loop.rank) from error
        self._folder.mkdir(parents=True, exist_ok=True)

    def on_epoch_end(self, run: Run) -> None:
        if not self._every.counts_updates and self._every.is_due(run.epoch, run.epoch + 1):
            self._save(run, f"epoch-{run.epoch:04}.png")

    def on_update_end(self, run: Run) -> None:
        if self._every.counts_updates and self._every.is_due(run.update - 1, run.update):
            self._save(run, f"update-{run.update:08}.png")

    def _save(self, run: Run, name: str) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="tight")
        self._draw(figure, self._batch, _predict(run, self._batch))
        path = self._folder / name
        figure.savefig(path, dpi=100)
        self.paths.append(str(path))


def _predict(run: Run, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return run.call_model("forward", **batch)
    if isinstance(batch, list | tuple):
        return run.call_model("forward", *(batch[:-1] if len(batch) > 1 else batch))
    return run.call_model("forward", batch)


def draw_classes(figure: Figure, batch: Any, output: Any) -> None:
    """Draw images titled with the predicted class, and the target if it differs. Raises LoopError for other data."""
    parts = list(batch) if isinstance(batch, list | tuple) else [batch]
    images, targets = parts[0], parts[1] if len(parts) > 1 else None
    if not _are_images(images) or not (isinstance(output, torch.Tensor) and output.ndim == 2):
        raise LoopError(
            "drawing predictions",
            found=f"samples are {_describe(images)} and outputs {_describe(output)}",
            fix="Pass draw=lambda figure, batch, output: ..., which draws on a matplotlib figure.",
        )
    columns = math.ceil(math.sqrt(2 * len(images)))
    rows = math.ceil(len(images) / columns)
    for index, (image, guess) in enumerate(zip(images, output.argmax(1).tolist(), strict=True)):
        axis = figure.add_subplot(rows, columns, index + 1)
        axis.imshow(_to_pixels(image), cmap="gray")
        target = guess if targets is None else int(targets[index])
        axis.set_title(str(guess) if guess == target else f"{guess} ({target})", color="k" if guess == target else "r")
        axis.set_axis_off()


def _are_images(images: Any) -> bool:
    return isinstance(images, torch.Tensor) and (images.ndim == 3 or (images.ndim == 4 and images.shape[1] in (1, 3)))


def _to_pixels(image: torch.Tensor) -> Any:
    """Return pixels of shape (height, width) or (height, width, channels), from 0 to 1."""
    image = image.detach().float()
    low, high = image.amin(), image.amax()
    scaled = (image - low) / (high - low).clamp_min(1e-12)
    return scaled.permute(1, 2, 0).squeeze(-1).numpy() if scaled.ndim == 3 else scaled.numpy()


def _describe(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
