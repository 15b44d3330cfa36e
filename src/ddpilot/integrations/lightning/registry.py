# SPDX-License-Identifier: Apache-2.0
"""Register the strategy "ddpilot" with Lightning, and optionally replace its notebook strategies.

Lightning has no entry point for strategies (those for callbacks are read after a strategy was chosen), so importing
`ddpilot.integrations.lightning` registers them. This module imports neither Lightning nor torch itself.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

from ddpilot.environments.interpreter import forget, when_imported
from ddpilot.errors import LaunchError
from ddpilot.integrations.lightning.namespaces import NAMESPACES, Namespace

_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
}
_MAPPED = ("ddp_notebook", "ddp_spawn", "ddp_fork")
_KEPT = "ddpilot_keeps"
"""Key under which a registry entry keeps the one it replaces; also the attribute of a replaced method."""


def _strategy_modules() -> list[tuple[Namespace, str]]:
    return [(each, f"{parent}.strategies") for each in NAMESPACES for parent in (each.fabric, each.trainer)]


def register() -> None:
    """Register the strategy "ddpilot" and its variants with `Trainer` and `Fabric`, as soon as they are imported."""
    for namespace, name in _strategy_modules():
        when_imported(name, "register", functools.partial(_register, namespace))


def _register(namespace: Namespace, module: ModuleType) -> None:
    for suffix, options in _OPTIONS.items():
        settings = "".join(f", `{name}={value}`" for name, value in options.items())
        about = f"DDP on ranks from ddpilot's rank server{settings}"
        made = _strategy(namespace, module)
        _registry(module).register(f"ddpilot{suffix}", made, description=about, override=True, **options)


def _registry(module: ModuleType) -> Any:
    is_of_trainer = hasattr(module, "StrategyRegistry")
    return module.StrategyRegistry if is_of_trainer else module.STRATEGY_REGISTRY


def _strategy(namespace: Namespace, module: ModuleType) -> type:
    from ddpilot.integrations.lightning.strategies import strategy_class

    return strategy_class(namespace, for_fabric=module.__name__.startswith(f"{namespace.fabric}."))


def use_for_notebooks(enabled: bool = True) -> None:
    """Let Lightning's notebook strategies start their ranks from ddpilot's rank server; False reverts this.

    The names "ddp_notebook", "ddp_spawn" and "ddp_fork" ("auto" selects the last one in a notebook with several
    devices), with and without `_find_unused_parameters_true` or `_false`, then mean "ddpilot". A strategy object that a
    library created with `start_method="spawn"` or "fork" keeps its options, and its ranks start the same way. Applies
    to each Trainer and Fabric created afterwards in this process, of `lightning` and of `pytorch_lightning`, also if
    they are imported later. Logs one INFO line in Lightning's log. Idempotent.

    Raises LaunchError if neither is installed.
    """
    if not any(namespace.is_installed for namespace in NAMESPACES):
        raise LaunchError(
            "mapping Lightning's strategies for notebooks",
            found="neither `lightning` nor `pytorch_lightning` is installed in this environment",
            fix='Install one: pip install "ddpilot[lightning]"',
        )
    logged: list[Namespace] = []
    for namespace, name in _strategy_modules():
        if enabled:
            when_imported(name, "map", functools.partial(_map, namespace, logged))
        else:
            forget(name, "map")
            if name in sys.modules:
                _restore(sys.modules[name])


def _map(namespace: Namespace, logged: list[Namespace], module: ModuleType) -> None:
    registry = _registry(module)
    mapped = {f"{base}{suffix}" for base in _MAPPED for suffix in _OPTIONS}
    replaced = {name: entry for name, entry in registry.items() if name in mapped and _KEPT not in entry}
    for name, kept in replaced.items():
        options = {key: value for key, value in kept["init_params"].items() if key != "start_method"}
        about = f'"{name}", its ranks from ddpilot\'s rank server'
        registry.register(name, _strategy(namespace, module), description=about, override=True, **options)
        registry[name][_KEPT] = kept
    if replaced and not logged:
        logged.append(namespace)
        names = ", ".join(f'"{name}"' for name in _MAPPED)
        namespace.of_fabric("utilities.rank_zero").rank_zero_info(
            f"ddpilot: the strategies {names} now start their ranks from ddpilot's rank server, as "
            'strategy="ddpilot" does; `use_for_notebooks(False)` reverts this.'
        )
    _take_over(_multiprocessing_launcher(module))


def _restore(module: ModuleType) -> None:
    registry = _registry(module)
    for name, entry in registry.items():
        registry[name] = entry.get(_KEPT, entry)
    launcher = _multiprocessing_launcher(module)
    for name in ("launch", "is_interactive_compatible"):
        kept = getattr(vars(launcher)[name], "fget", vars(launcher)[name])
        if hasattr(kept, _KEPT):
            setattr(launcher, name, getattr(kept, _KEPT))


def _multiprocessing_launcher(module: ModuleType) -> Any:
    return importlib.import_module(f"{module.__name__}.launchers.multiprocessing")._MultiProcessingLauncher


def _take_over(launcher_class: Any) -> None:
    """Patch Lightning's multiprocessing launcher, or a class that a library derived from it, for strategy objects."""
    from ddpilot.integrations.lightning.strategies import RankServerLauncher, ranks_exist
    from ddpilot.launcher import Launcher

    original = launcher_class.launch
    if hasattr(original, _KEPT):
        return

    @functools.wraps(original)
    def launch(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if ranks_exist(self._strategy):
            kwargs.pop("trainer", None)
            return function(*args, **kwargs)
        return RankServerLauncher(self._strategy, Launcher()).launch(function, *args, **kwargs)

    def is_interactive_compatible(_launcher: Any) -> bool:
        return True

    setattr(launch, _KEPT, original)
    setattr(is_interactive_compatible, _KEPT, launcher_class.is_interactive_compatible)
    launcher_class.launch = launch
    launcher_class.is_interactive_compatible = property(is_interactive_compatible)
