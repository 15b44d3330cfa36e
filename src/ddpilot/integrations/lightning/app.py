# SPDX-License-Identifier: Apache-2.0
"""The app "lightning": adapts `Trainer` and `Fabric` arguments for one process to the ranks of a session.

Imported in the notebook; imports neither `lightning` nor `pytorch_lightning`, nor torch. Both parse their arguments in
one place, the connector. In a torchrun job, Lightning requires `devices` x `num_nodes` to be the world size, and a
strategy that starts no processes; its defaults in a notebook are the opposite.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from ddpilot.integrations.libraries import replace, wrap
from ddpilot.module_names import LIGHTNING_PRELOAD
from ddpilot.session.apps import App, AppContext

_CONNECTORS = (
    ("lightning.pytorch.trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
    ("lightning.fabric.connector", "_Connector"),
    ("pytorch_lightning.trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
    ("lightning_fabric.connector", "_Connector"),
)
_ONE_PROCESS: tuple[object, ...] = ("auto", 1, "1", -1, "-1")
_STARTS_PROCESSES = re.compile("^ddp_(notebook|spawn|fork)")


def adapt_connectors(context: AppContext) -> None:
    """Let Lightning, under each import name that is installed, use all ranks of the session."""
    for module_name, class_name in _CONNECTORS:
        if find_spec(module_name.partition(".")[0]) is None:
            continue
        module = importlib.import_module(module_name)
        replace(context.cleanup, module, "_IS_INTERACTIVE", False)
        wrap(context.cleanup, getattr(module, class_name), "__init__", _resolving(os.environ))
    rank_zero = importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only
    replace(context.cleanup, rank_zero, "rank", context.rank)


def _resolving(environ: Mapping[str, str]) -> Callable[..., None]:
    def initialize(original: Callable[..., None], connector: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(connector, *args, **kwargs)
        bound.apply_defaults()
        original(**resolve_arguments(bound.arguments, environ))

    return initialize


def resolve_arguments(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the `arguments` of a connector, with those of a single process replaced by this job's.

    `devices` "auto", 1 or -1 becomes the number of ranks on this node, and `num_nodes` 1 the number of nodes of the
    job. `strategy` "auto", or one that would start processes from a notebook, becomes its "ddp" variant, which uses
    running processes. Other values are kept, and all of them if the world size is 1.
    """
    local_world_size, world_size = int(environ["LOCAL_WORLD_SIZE"]), int(environ["WORLD_SIZE"])
    resolved = dict(arguments)
    if world_size == 1:
        return resolved
    if resolved["devices"] in _ONE_PROCESS:
        resolved["devices"] = local_world_size
    if resolved["num_nodes"] == 1:
        resolved["num_nodes"] = world_size // local_world_size
    strategy = resolved["strategy"]
    if strategy == "auto":
        resolved["strategy"] = "ddp"
    elif isinstance(strategy, str):
        resolved["strategy"] = _STARTS_PROCESSES.sub("ddp", strategy)
    return resolved


APP = App(
    name="lightning",
    libraries=("lightning", "pytorch_lightning"),
    install="ddpilot[lightning]",
    preload=(LIGHTNING_PRELOAD,),
    initializer=adapt_connectors,
)
