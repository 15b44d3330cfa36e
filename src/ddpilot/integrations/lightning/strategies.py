# SPDX-License-Identifier: Apache-2.0
"""The strategy "ddpilot": Lightning's own DDP, with processes started by ddpilot's rank server.

One class per installed Lightning and for each of Trainer and Fabric, created on first access.
"""

from __future__ import annotations

from typing import Any

from ddpilot.group.gloo_threads import let_works_end
from ddpilot.integrations.lightning.launcher import RankServerLauncher
from ddpilot.integrations.lightning.namespaces import LIGHTNING, NAMESPACES, PYTORCH_LIGHTNING, Namespace
from ddpilot.launcher import Launcher

_DOC = """Lightning's `DDPStrategy` on ranks that are forked from ddpilot's rank server, not from this process.

    So it works in a notebook in which torch, OpenMP or CUDA has been used, and sees what cells define. Every option of
    `DDPStrategy` is taken as it is, apart from `start_method`: `find_unused_parameters`, `static_graph`,
    `gradient_as_bucket_view`, `process_group_backend`, `timeout`, communication hooks.

    `launcher`: a `ddpilot.Launcher` with options for the ranks (`output`, `env`, `timeout_s`, `preload`, ...; default:
    `Launcher()`). Its `nproc_per_node` is not used, since `devices` says it.

    Where the processes are already there (under torchrun or `ddpilot run`, in a rank of a session or of `launch`, in a
    Slurm job), it starts none and is plain DDP. Raises LaunchError for more than one node, ShipError for what cannot
    travel, RankError with the first failure in time, and RanksStopped after the stop button.
    """


class _OnRankServer:
    """Mixin for Lightning's DDP strategies that starts ranks from the rank server."""

    cluster_environment: Any

    def __init__(self, *args: Any, launcher: Launcher | None = None, **kwargs: Any) -> None:
        if "start_method" in kwargs:
            raise TypeError(f"{type(self).__name__} starts its ranks from the rank server and takes no `start_method`")
        super().__init__(*args, **kwargs)
        self._options = launcher or Launcher()

    def _configure_launcher(self) -> None:
        is_running = self.cluster_environment.creates_processes_externally
        if is_running:
            let_works_end()  # Lightning does not destroy a gloo group before the process ends
        self._launcher = None if is_running else RankServerLauncher(self, self._options)

    def on_exception(self, exception: BaseException) -> None:
        """Let Lightning extend torch's message about unused parameters, with ddpilot's names in its advice."""
        super().on_exception(exception)  # type: ignore[misc]
        exception.args = tuple(_with_our_names(each) for each in exception.args)


def _with_our_names(text: Any) -> Any:
    if not isinstance(text, str) or "strategy='ddp_find_unused" not in text:
        return text
    return text.replace("strategy='ddp_find", "strategy='ddpilot_find").replace("=DDPStrategy(", "=DdpilotStrategy(")


def _make(name: str, namespace: Namespace, *, for_fabric: bool) -> type:
    module = (namespace.of_fabric if for_fabric else namespace.of_trainer)("strategies.ddp")
    about = {"__module__": __name__, "__qualname__": name, "__doc__": _DOC}
    return type(name, (_OnRankServer, module.DDPStrategy), about)


_MAKERS = {
    "DdpilotStrategy": (LIGHTNING, False),
    "DdpilotFabricStrategy": (LIGHTNING, True),
    "PytorchLightningDdpilotStrategy": (PYTORCH_LIGHTNING, False),
    "PytorchLightningDdpilotFabricStrategy": (PYTORCH_LIGHTNING, True),
}


def __getattr__(name: str) -> type:
    # Also called when a trainer is unpickled on a rank.
    if name not in _MAKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    namespace, for_fabric = _MAKERS[name]
    made = _make(name, namespace, for_fabric=for_fabric)
    globals()[name] = made
    return made


def strategy_class(namespace: Namespace, *, for_fabric: bool = False) -> type:
    """Return the strategy for the Trainer of `namespace`, or for its Fabric."""
    name = next(name for name, wanted in _MAKERS.items() if wanted == (namespace, for_fabric))
    made: type = globals().get(name) or __getattr__(name)
    return made


def default_strategy_class(*, for_fabric: bool = False) -> type:
    """Return the strategy class for the Lightning package that is loaded, otherwise for the one that is installed.

    Raises ImportError if neither package is installed.
    """
    chosen = [each for each in NAMESPACES if each.is_loaded] or [each for each in NAMESPACES if each.is_installed]
    if not chosen:
        raise ImportError('neither `lightning` nor `pytorch_lightning` is installed; pip install "ddpilot[lightning]"')
    return strategy_class(chosen[0], for_fabric=for_fabric)
