# SPDX-License-Identifier: Apache-2.0
"""The strategy "ddpilot": Lightning's own DDP, and the launcher that runs it on ranks from ddpilot's rank server.

One class per installed Lightning and for each of Trainer and Fabric, created on first access.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ddpilot.errors import LaunchError, LaunchInterrupted, ShipError
from ddpilot.group.teardown import let_works_end
from ddpilot.integrations.lightning.namespaces import LIGHTNING, NAMESPACES, PYTORCH_LIGHTNING, Namespace, namespace_of
from ddpilot.integrations.lightning.transfer import (
    RankResult,
    apply_result,
    collect_predictions,
    collect_result,
    join_predictions,
)
from ddpilot.launcher import Launcher
from ddpilot.launching.shipping.torch_settings import OnRank
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.module_names import LIGHTNING_PRELOAD

_DOC = """Lightning's `DDPStrategy` on ranks that are forked from ddpilot's rank server, not from this process.

    So it works in a notebook in which torch, OpenMP or CUDA has been used, and ranks see what cells define. Takes every
    option of `DDPStrategy` apart from `start_method`: `find_unused_parameters`, `static_graph`,
    `gradient_as_bucket_view`, `process_group_backend`, `timeout`, communication hooks.

    `launcher`: a `ddpilot.Launcher` with options for the ranks (`output`, `env`, `timeout_s`, `preload`, ...; default:
    `Launcher()`). Its `nproc_per_node` is not used, as `devices` determines it.

    If the processes already exist (under torchrun or `ddpilot run`, in a rank of a session or of `launch`, in a Slurm
    job), it starts none and is plain DDP, and raises ValueError if `devices` x `num_nodes` is not their number. Raises
    LaunchError for more than one node, ShipError for objects that cannot be pickled, RankError with the earliest
    failure, and RanksStopped after an interrupt.
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
        is_running = ranks_exist(self)
        if is_running:
            let_works_end()  # Lightning does not destroy a gloo group before the process ends
        self._launcher = None if is_running else RankServerLauncher(self, self._options)

    def on_exception(self, exception: BaseException) -> None:
        """Let Lightning extend torch's message about unused parameters, with ddpilot's names in its advice."""
        super().on_exception(exception)  # type: ignore[misc]
        exception.args = tuple(_with_our_names(each) for each in exception.args)


def ranks_exist(strategy: Any) -> bool:
    """True if another launcher has started the ranks of `strategy`, and this process is one of them.

    Raises ValueError, as Lightning's own launcher does, if that has started more ranks or fewer.
    """
    environment = strategy.cluster_environment
    if not environment.creates_processes_externally:
        return False
    own = namespace_of(strategy).of_fabric("plugins.environments").LightningEnvironment
    if isinstance(environment, own) and dist.is_initialized() and dist.get_world_size() == 1:
        # It goes by LOCAL_RANK, which a fit with "ddp" on one device sets in this process and leaves set.
        return bool(strategy.num_nodes * strategy.num_processes == 1)
    environment.validate_settings(num_devices=strategy.num_processes, num_nodes=strategy.num_nodes)
    return True


def _with_our_names(text: Any) -> Any:
    if not isinstance(text, str) or "strategy='ddp_find_unused" not in text:
        return text
    return text.replace("strategy='ddp_find", "strategy='ddpilot_find").replace("=DDPStrategy(", "=DdpilotStrategy(")


_STRATEGIES = {
    "DdpilotStrategy": (LIGHTNING, False),
    "DdpilotFabricStrategy": (LIGHTNING, True),
    "PytorchLightningDdpilotStrategy": (PYTORCH_LIGHTNING, False),
    "PytorchLightningDdpilotFabricStrategy": (PYTORCH_LIGHTNING, True),
}


def __getattr__(name: str) -> type:
    # Also called when a trainer is unpickled on a rank.
    if name not in _STRATEGIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    namespace, for_fabric = _STRATEGIES[name]
    module = (namespace.of_fabric if for_fabric else namespace.of_trainer)("strategies.ddp")
    about = {"__module__": __name__, "__qualname__": name, "__doc__": _DOC}
    globals()[name] = created = type(name, (_OnRankServer, module.DDPStrategy), about)
    return created


def strategy_class(namespace: Namespace, *, for_fabric: bool = False) -> type:
    """Return the strategy for the Trainer of `namespace`, or for its Fabric."""
    name = next(name for name, key in _STRATEGIES.items() if key == (namespace, for_fabric))
    strategy: type = globals().get(name) or __getattr__(name)
    return strategy


def default_strategy_class(*, for_fabric: bool = False) -> type:
    """Return the strategy class for the Lightning package that is loaded, otherwise for the one that is installed.

    Raises ImportError if neither package is installed.
    """
    candidates = [each for each in NAMESPACES if each.is_loaded] or [each for each in NAMESPACES if each.is_installed]
    if not candidates:
        raise ImportError('neither `lightning` nor `pytorch_lightning` is installed; pip install "ddpilot[lightning]"')
    return strategy_class(candidates[0], for_fabric=for_fabric)


class RanksStopped(BaseException):
    """An interrupt ended all ranks of a Trainer or Fabric, and nothing was returned.

    It is not a KeyboardInterrupt: Lightning handles that by ignoring every later Ctrl-C and exiting the process.
    """

    def _render_traceback_(self) -> list[str]:
        """Render one line in IPython, as the parent's stack does not help."""
        return [f"RanksStopped: {self}"]


class RankServerLauncher:
    """Launcher of a Lightning strategy. All its processes have ended when `launch` returns."""

    is_interactive_compatible = True

    def __init__(self, strategy: Any, options: Launcher) -> None:
        self._strategy = strategy
        self._options = options

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` on one rank for each device of the strategy, and return rank 0's result.

        With a `trainer`, its progress, metrics, callbacks and loggers, and after `fit` the weights of its model, are
        set to those of rank 0, and predictions of all ranks are returned in the order of the dataset. Raises
        RanksStopped after an interrupt.
        """
        try:
            if trainer is None:
                return self._launch_fabric(function, args, kwargs)
            return self._launch_trainer(function, args, kwargs, trainer)
        except LaunchInterrupted as interrupt:
            raise RanksStopped(str(interrupt)) from None

    def _launch_fabric(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = getattr(function, "args", (function,))[0]
        if inner is getattr(namespace_of(self._strategy).of_fabric("fabric"), "_do_nothing", None):
            name = type(self._strategy).__name__
            raise TypeError(
                f"{name} starts its own ranks: pass `Fabric.launch` the function that they run, as in "
                "`fabric.launch(train)`, where `train(fabric)` is your code"
            )
        label = f"Fabric.launch({getattr(inner, '__name__', type(inner).__name__)})"
        on_rank = OnRank(run_fabric, label, with_random=True)
        return self._run(on_rank, self._strategy, function, args, kwargs)[0]

    def _launch_trainer(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trainer: Any
    ) -> Any:
        name = getattr(function, "__name__", "run").removeprefix("_").removesuffix("_impl")
        try:
            on_rank = OnRank(run_trainer, f"Trainer.{name}", with_random=True)
            results = list(self._run(on_rank, trainer, function, args, kwargs))
        except ShipError as error:
            _name_parts(trainer, args, kwargs, error)
            raise
        apply_result(trainer, results[0])
        predictions = join_predictions([result.predictions for result in results])
        if predictions is None and results[0].results and name == "predict" and len(results) > 1:
            warn = namespace_of(trainer).of_trainer("utilities.rank_zero").rank_zero_warn
            warn("The samples of this data loader have no indices, so only rank 0's predictions were returned.")
        return results[0].results if predictions is None else predictions

    def _run(self, on_rank: OnRank, owner: Any, function: Any, args: Any, kwargs: Any) -> Any:
        strategy = self._strategy
        if strategy.num_nodes > 1:
            raise LaunchError(
                f"starting the ranks of `{on_rank.__qualname__}`",
                found=f"`num_nodes={strategy.num_nodes}`, and ranks can be started on this machine only",
                fix="Start the script on each node with `ddpilot run` or torchrun; the strategy then starts nothing",
            )
        preload = (LIGHTNING_PRELOAD, *self._options.preload)
        launcher = replace(self._options, nproc_per_node=strategy.num_processes, preload=preload)
        return launcher.run(on_rank, owner, function, args, kwargs)

    def kill(self, signum: int) -> None:
        """Do nothing, for Lightning's signal handlers: `launch` forwards a stop itself, and no rank outlives it."""


def _name_parts(trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: ShipError) -> None:
    """Raise a ShipError with a path from a part that the user made, as a trainer's own parts all refer to each other.

    Returns if each of these parts can be pickled.
    """
    parts = {
        "model": trainer.lightning_module,
        **{f"trainer.callbacks[{index}]": callback for index, callback in enumerate(trainer.callbacks)},
        **{f"trainer.loggers[{index}]": logger for index, logger in enumerate(trainer.loggers)},
        "args": args,
        "kwargs": kwargs,
    }
    for name, part in parts.items():
        parcel, _ = ship("ddpilot-part", {name: part}, part, did=error.did, known=None)
        os.close(parcel)


def run_fabric(strategy: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a rank of `Fabric.launch`. As collective as `function`; only rank 0 returns its value."""
    _become_rank(strategy)
    value = function(*args, **kwargs)
    return value if strategy.is_global_zero else None


def run_trainer(
    trainer: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> RankResult:
    """Run a rank of `Trainer.fit`, `validate`, `test` or `predict`. Collective."""
    strategy = trainer.strategy
    _become_rank(strategy)
    trainer._accelerator_connector.cluster_environment = strategy.cluster_environment
    what = trainer.state.fn.value  # may be "test" afterwards, as callbacks call it at the end of a fit
    callbacks = list(trainer.callbacks)  # the model may add callbacks and change their order
    try:
        results = function(*args, **kwargs)
    except BaseException as error:
        strategy.on_exception(error)  # extends torch's message about unused parameters
        raise
    predictions = collect_predictions(trainer, results) if what == "predict" else None
    return collect_result(trainer, callbacks, results, predictions, with_weights=what == "fit")


def _become_rank(strategy: Any) -> None:
    """Reconfigure the strategy, set up in the parent as rank 0, as one in a torchrun job."""
    strategy.cluster_environment = namespace_of(strategy).of_fabric("plugins.environments").TorchElasticEnvironment()
    strategy._launcher = None  # a `trainer.test()` inside `fit` runs on the existing ranks
    for name in ("set_world_ranks", "_set_world_ranks"):  # the Trainer's strategy has the first, Fabric's the second
        if hasattr(strategy, name):
            getattr(strategy, name)()
