# SPDX-License-Identifier: Apache-2.0
"""Projects with images: classes with weights, segmentation with unlabelled pixels, detection with lists of dicts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from tests.dist.projects.supervised import NUM_SAMPLES, Losses, Project, Supervised, draw, draw_integers

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
UNLABELLED = 255


def make_cnn(num_outputs: int) -> nn.Module:
    """Takes (samples, 1, 6, 6)."""
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(body, nn.Linear(4 * 36, num_outputs))


def weighted_and_smoothed(model: nn.Module, batch: Any) -> Losses:
    """cross_entropy with `weight` is a mean over the weights of the classes."""
    x, y = batch
    weights = CLASS_WEIGHTS.to(x.device)
    loss = functional.cross_entropy(model(x), y, weight=weights, label_smoothing=0.1)
    return {"classes": (loss, weights[y].sum().item())}


def labelled_pixels(model: nn.Module, batch: Any) -> Losses:
    """A mean over the pixels that have a label; a batch may have none."""
    x, y = batch
    total = functional.cross_entropy(model(x), y, ignore_index=UNLABELLED, reduction="sum")
    num_pixels = int((y != UNLABELLED).sum())
    return {"pixels": (total / max(num_pixels, 1), num_pixels)}


def make_masks() -> torch.Tensor:
    """Labels of (samples, 6, 6) pixels; some images have none at all."""
    masks = draw_integers(0, 3, NUM_SAMPLES, 6, 6, seed=2)
    masks[draw(NUM_SAMPLES, 6, 6, seed=3) > 0.5] = UNLABELLED
    masks[::5] = UNLABELLED
    return masks


class Boxes(Dataset[dict[str, torch.Tensor]]):
    """Images with no box or several, each a dict."""

    def __init__(self) -> None:
        self.images, self.counts = draw(NUM_SAMPLES, 1, 6, 6), draw_integers(0, 4, NUM_SAMPLES, seed=4)
        self.boxes, self.labels = draw(NUM_SAMPLES, 4, 4, seed=5), draw_integers(0, 3, NUM_SAMPLES, seed=6)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        boxes = self.boxes[number, : self.counts[number]]
        return {"image": self.images[number], "boxes": boxes, "label": self.labels[number]}


class Detector(nn.Module):
    """For each image a label, and for each of its boxes four coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.label = make_cnn(8), nn.Linear(8, 3)
        self.box = nn.Linear(8 + 4, 4)

    def forward(self, images: torch.Tensor, anchors: torch.Tensor, owners: torch.Tensor) -> Any:
        """images (samples, 1, 6, 6), anchors (boxes, 4) and their images' numbers (boxes,)."""
        features = self.body(images)
        return self.label(features), self.box(torch.cat([features[owners], anchors], dim=1))


def boxes_and_labels(model: nn.Module, batch: list[dict[str, torch.Tensor]]) -> Losses:
    """One loss is a mean over boxes, the other one over images."""
    images = torch.stack([sample["image"] for sample in batch]) if batch else draw(0, 1, 6, 6)
    boxes = torch.cat([sample["boxes"] for sample in batch]) if batch else draw(0, 4)
    labels = torch.stack([sample["label"] for sample in batch]) if batch else draw_integers(0, 3, 0)
    sizes = torch.tensor([len(sample["boxes"]) for sample in batch], dtype=torch.int64)
    owners = torch.arange(len(batch)).repeat_interleave(sizes)
    scores, found = model(images, boxes.sin(), owners)
    box_loss = functional.smooth_l1_loss(found, boxes, reduction="sum") / max(4 * len(boxes), 1)
    return {"boxes": (box_loss, len(boxes)), "labels": functional.cross_entropy(scores, labels)}


def make_segmenter() -> nn.Module:
    """Three scores for each pixel."""
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 1))


def keep_list(samples: list[Any]) -> list[Any]:
    """The batch is the list of its samples, as torchvision's detection models take it."""
    return samples


IMAGES = draw(NUM_SAMPLES, 1, 6, 6)
PROJECTS: dict[str, Project] = {
    "class weights and smoothing": Supervised(
        make_model=lambda: make_cnn(3),
        losses=weighted_and_smoothed,
        dataset=TensorDataset(IMAGES, draw_integers(0, 3, NUM_SAMPLES, seed=1)),
    ),
    "segmentation with unlabelled pixels": Supervised(
        make_model=make_segmenter, losses=labelled_pixels, dataset=TensorDataset(IMAGES, make_masks()), accumulate=3
    ),
    "detection with lists of dicts": Supervised(
        make_model=Detector, losses=boxes_and_labels, dataset=Boxes(), collate_fn=keep_list, count=len
    ),
}
