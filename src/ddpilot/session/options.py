# SPDX-License-Identifier: Apache-2.0
"""What a session can be told, checked when it is said."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpilot.errors import LaunchError
from ddpilot.launching.options import LaunchOptions, Output
from ddpilot.watch.options import OnFinding, WatchOptions

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose_visible(gpus: Sequence[int], visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for `gpus`, counted among the devices in `visible`, the variable's text (None: not set).

    A number beyond them stays: that there is no such GPU is found when the devices are counted.
    """
    listed = [] if visible is None else [item.strip() for item in visible.split(",")]
    return ",".join(str(gpu) if visible is None or gpu >= len(listed) else listed[gpu] for gpu in gpus)


@dataclass(frozen=True, kw_only=True)
class SessionOptions(WatchOptions):
    """Options of a session on this machine, with those of `WatchOptions`.

    Raises LaunchError for a value that cannot be meant.
    """

    nproc_per_node: int | str = "auto"
    """Number of ranks. "auto": the GPUs of `gpus` or all that are visible, else 1; "gpu" and "cpu" as in `Launcher`."""

    gpus: tuple[int, ...] = ()
    """Numbers of the GPUs that the ranks may see, among those that this process sees, as `torch.device("cuda", n)`
    counts them: with CUDA_VISIBLE_DEVICES=2,3 number 0 is the machine's GPU 2. () for all."""

    backend: str | None = None
    """Backend of the group ("gloo", "nccl", "cpu:gloo,cuda:nccl"); None chooses."""

    seed: int | None = None
    """Seeds `random`, torch and numpy with the same number on every rank when it starts; None: fresh on every rank."""

    apps: tuple[str, ...] = ()
    """Names of apps that prepare a training library on every rank, such as "fastai"."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks, on top of the parent's."""

    preload: tuple[str, ...] = ()
    """Modules that are imported once, before the ranks are forked."""

    respawn: bool = False
    """Start a rank that died again at once, instead of leaving that to `restart`."""

    keep_cache: bool = False
    """Leave the GPU's memory cache as it is between cells. By default it is emptied after a cell that failed, and when
    more than an eighth of the GPU's memory is in it unused."""

    verbose: bool = False
    """Let apps say more."""

    output: Output = "labelled"
    """"labelled": all output with the rank in front; "rank_zero": rank 0's alone; "silent": none."""

    output_limit_bytes: int | None = None
    """Bytes shown of each rank's output of one cell; None: 1 MB in a notebook, else no limit."""

    on_finding: OnFinding = "report"
    """"report": what the watch finds is shown, and the cell goes on; "stop": an error ends the cell, the group is made
    anew, and every variable stays. A function is called with each finding; the cell ends where it returns "stop"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        gpus: object = self.gpus
        if not isinstance(gpus, tuple) or not all(isinstance(gpu, int) and gpu >= 0 for gpu in gpus):
            raise LaunchError("reading `gpus`", found=f"{gpus!r}", fix="Give numbers of GPUs, such as `gpus=(0, 1)`")
        if self.gpus and isinstance(self.nproc_per_node, int) and self.nproc_per_node > len(self.gpus):
            raise LaunchError(
                "reading `nproc_per_node`",
                found=f"{self.nproc_per_node} ranks for {len(self.gpus)} GPUs in `gpus`",
                fix="Ask for at most one rank per GPU, or leave `gpus` out to share them",
            )
        apps: object = self.apps
        if isinstance(apps, str):
            raise LaunchError("reading `apps`", found=f"{apps!r}", fix=f"Write `apps=({apps!r},)`")
        seed: object = self.seed
        if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**63):
            raise LaunchError("reading `seed`", found=f"{self.seed!r}", fix="Give a number from 0 to 2**63 - 1")
        self.launch_options()

    def launch_options(self) -> LaunchOptions:
        """The part that starting processes needs."""
        given = {**os.environ, **self.env}.get(_VISIBLE) if self.gpus else None
        visible = {_VISIBLE: choose_visible(self.gpus, given)} if self.gpus else {}
        return LaunchOptions(
            nproc_per_node=self.nproc_per_node,
            backend=self.backend,
            env={**self.env, **visible} if visible else self.env,
            preload=self.preload,
            output=self.output,
            output_limit_bytes=self.output_limit_bytes,
        )
