# SPDX-License-Identifier: Apache-2.0
"""What a session can be told, checked when it is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpilot.errors import LaunchError
from ddpilot.launching.options import LaunchOptions, Output
from ddpilot.watch.options import OnFinding, WatchOptions


@dataclass(frozen=True, kw_only=True)
class SessionOptions(WatchOptions):
    """Options of a session on this machine, with those of `WatchOptions`.

    Raises LaunchError for a value that cannot be meant.
    """

    nproc_per_node: int | str = "auto"
    """Number of ranks. "auto": the GPUs of `gpus` or all that are visible, else 1; "gpu" and "cpu" as in `Launcher`."""

    gpus: tuple[int, ...] = ()
    """Numbers of the GPUs that the ranks may see, as CUDA_VISIBLE_DEVICES counts them; () for all."""

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
    """Leave CUDA's memory cache as it is between cells, instead of emptying it."""

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
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))} if self.gpus else {}
        return LaunchOptions(
            nproc_per_node=self.nproc_per_node,
            backend=self.backend,
            env={**self.env, **visible} if visible else self.env,
            preload=self.preload,
            output=self.output,
            output_limit_bytes=self.output_limit_bytes,
        )
