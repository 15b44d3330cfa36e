# SPDX-License-Identifier: Apache-2.0
"""Pictures of losses: of one, two and four ranks beside a peer's, and of a run that goes on with other ranks."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import ddpilot
from pictures.files import SCHEMES, Scheme, write_svg

EPOCHS = 3
BATCH_SIZE = 64
WORLD_SIZES = (1, 2, 4)
_STYLES: tuple[dict[str, Any], ...] = (
    {"linewidth": 4.5, "alpha": 0.35},
    {"linewidth": 2.2},
    {"linewidth": 1.1, "linestyle": "--"},
)
_COLORS = {"light": ("#1f6feb", "#d1242f", "#24292f"), "dark": ("#58a6ff", "#ff7b72", "#e6edf3")}


def make_parts() -> tuple[Any, Any, Any]:
    """Return a model for handwritten digits, its optimizer and 1,437 scans to train on."""
    import torch

    from examples.digits_loop import build_model, load_data

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model()
    return model, torch.optim.SGD(model.parameters(), lr=0.2), load_data()[0]


def train_with_loop(folder: str | None = None, stop_at: int = 0) -> tuple[int, list[float]]:
    """Train with `ddpilot.Loop`; return the number of updates before this run, and the loss of each of its batches.

    With a `folder` it saves there and resumes from there; `stop_at`: the number of updates after which it leaves.
    """
    import torch

    loop = ddpilot.Loop(seed=0, checkpoint_dir=folder)
    model, optimizer, data = make_parts()
    model, optimizer = loop.prepare(model, optimizer)
    loader = loop.loader(data, global_batch_size=BATCH_SIZE, shuffle=True)
    losses: list[float] = []
    for _ in loop.epochs(EPOCHS):
        for images, labels in loop.batches(loader):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loop.backward(loss)
            loop.step(optimizer)
            losses.append(loop.reduce(loss).item())
            if loop.num_updates == stop_at:
                loop.stop()
    return loop.num_updates - len(losses), losses


def train_with_accelerate() -> list[float]:
    """Train with Accelerate in its default settings, with the global batch divided by hand; the loss of each batch."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True)
    model, optimizer, data = make_parts()
    set_seed(0)
    size = BATCH_SIZE // accelerator.num_processes
    loader: Any = torch.utils.data.DataLoader(data, batch_size=size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            mean: Any = accelerator.reduce(loss.detach(), "mean")
            losses.append(mean.item())
    accelerator.free_memory()
    return losses


def make_figure(num_panels: int, scheme: Scheme) -> tuple[Any, Sequence[Any]]:
    """Return a figure with panels side by side, without a background of its own."""
    from matplotlib.figure import Figure

    ink = "#24292f" if scheme == "light" else "#e6edf3"
    figure = Figure(figsize=(8.5, 3.2), layout="constrained", facecolor="none")
    panels = figure.subplots(1, num_panels, sharey=True, squeeze=False)[0]
    for panel in panels:
        panel.set_facecolor("none")
        panel.tick_params(colors=ink)
        panel.spines[:].set_color(ink)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlabel("update", color=ink)
    panels[0].set_ylabel("loss of the global batch", color=ink)
    return figure, panels


def to_svg(figure: Any, panels: Sequence[Any], scheme: Scheme) -> str:
    """Return the figure as SVG that is the same each time, with a legend in each panel."""
    import matplotlib as mpl

    for panel in panels:
        ink = panel.yaxis.label.get_color() if panel is panels[0] else panels[0].yaxis.label.get_color()
        panel.set_ylim(bottom=0)
        panel.legend(frameon=False, labelcolor=ink)
        panel.title.set_color(ink)
    file = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": scheme, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def draw_same_losses() -> None:
    """Draw "same_losses": ddpilot and Accelerate, each at 1, 2 and 4 ranks."""
    ours = {n: ddpilot.launch(train_with_loop, nproc_per_node=n)[0][1] for n in WORLD_SIZES}
    theirs = {n: ddpilot.Launcher(nproc_per_node=n, watch=False).run(train_with_accelerate)[0] for n in WORLD_SIZES}
    apart = max(abs(a - b) / b for n in WORLD_SIZES for a, b in zip(ours[n], ours[1], strict=True))
    assert apart < 1e-3, apart
    for scheme in SCHEMES:
        figure, panels = make_figure(2, scheme)
        for panel, losses, title in zip(panels, (ours, theirs), _titles(apart), strict=True):
            panel.set_title(title, fontsize=10)
            for n, style, color in zip(WORLD_SIZES, _STYLES, _COLORS[scheme], strict=True):
                panel.plot(losses[n], color=color, label=f"{n} rank{'s' * (n > 1)}", **style)
        write_svg("same_losses", scheme, to_svg(figure, panels, scheme))


def _titles(apart: float) -> tuple[str, str]:
    return (
        f"ddpilot.Loop: at most {apart:.0e} apart",
        f"Accelerate {version('accelerate')}, default settings",
    )


def draw_resume() -> None:
    """Draw "resume": a run on 2 ranks that is stopped and goes on with 4, over one that was not stopped."""
    whole = ddpilot.launch(train_with_loop, nproc_per_node=2)[0][1]
    with tempfile.TemporaryDirectory() as folder:
        parts = [
            ddpilot.launch(train_with_loop, folder, stop_at, nproc_per_node=n)[0] for n, stop_at in ((2, 30), (4, 0))
        ]
    resumed = [loss for _, losses in parts for loss in losses]
    apart = max(abs(a - b) / b for a, b in zip(resumed, whole, strict=True))
    assert apart < 1e-3, apart
    for scheme in SCHEMES:
        figure, panels = make_figure(1, scheme)
        colors = _COLORS[scheme]
        panels[0].set_title(
            f"Stopped after {parts[1][0]} updates, resumed on 4 ranks: at most {apart:.0e} apart", fontsize=10
        )
        panels[0].plot(whole, color=colors[2], label="2 ranks, not stopped", **_STYLES[0])
        for (first, losses), n, color in zip(parts, (2, 4), colors[:2], strict=True):
            panels[0].plot(range(first, first + len(losses)), losses, color=color, label=f"{n} ranks", linewidth=1.8)
        write_svg("resume", scheme, to_svg(figure, panels, scheme))
