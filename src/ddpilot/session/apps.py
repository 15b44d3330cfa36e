# SPDX-License-Identifier: Apache-2.0
"""Apps: how a training library has each rank of a session prepared.

A library, or anybody, ships one by declaring an `App` and naming it in the entry-point group "ddpilot.apps". The
module that declares it is imported in the notebook too: it must not import the library, nor torch, by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from ddpilot.errors import LaunchError

ENTRY_POINTS = "ddpilot.apps"
"""The entry-point group in which apps are found."""


@dataclass(frozen=True, kw_only=True)
class AppContext:
    """What an app is given on a rank."""

    rank: int
    """0 to `world_size` - 1."""
    world_size: int
    """Number of ranks of the session."""
    local_rank: int
    """The position on this node."""
    device: Any
    """The `torch.device` of this rank, already current."""
    namespace: dict[str, Any]
    """The rank's ``__main__``: the variables of the notebook."""
    verbose: bool
    """Was the session asked to let apps say more?"""
    seed: int | None
    """The session's seed, with which every rank was seeded; None where each rank has its own entropy."""
    enter_group: Callable[[], Any]
    """Returns this rank's `Group`. Where it is in none it enters one: collective then."""
    is_everywhere: Callable[[], bool]
    """Does what runs now run on every rank? A collective inside a cell on rank 0 alone would wait for ever."""
    cleanup: ExitStack
    """What is registered here is undone when the session ends, after the finalizers, the last first."""


@dataclass(frozen=True, kw_only=True)
class App:
    """One app: what is done on every rank of a session that was started with its name.

    `initializer` runs once on each rank before its first cell, `finalizer` when the session ends and `after_cell` after
    every cell, when its result has been sent; all in the rank's main thread. What `initializer` raises fails the start;
    what the others raise is printed by the rank.
    """

    name: str
    """The name by which it is asked for, and that of its entry point."""
    libraries: tuple[str, ...] = ()
    """Import names of the library; one of them at least has to be installed. () where there is nothing to look for."""
    install: str = ""
    """What to give to pip where none of `libraries` is there, such as "ddpilot[fastai]"."""
    preload: tuple[str, ...] = ()
    """Modules imported once, in the process from which ranks are forked, where they are installed.

    Not those that look at the environment, at IPython or at GPUs while they are imported: a rank would inherit what
    they saw there.
    """
    imports: tuple[str, ...] = ()
    """Statements that are run in each rank's namespace."""
    initializer: Callable[[AppContext], None] | None = None
    finalizer: Callable[[AppContext], None] | None = None
    after_cell: Callable[[AppContext], None] | None = None


def find_app(name: str) -> App:
    """The app that is installed under `name`.

    Raises LaunchError where there is none of that name, where it is broken, and where its library is not installed.
    """
    did = f"starting a session with app {name!r}"
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise LaunchError(did, found="no app of that name is installed", fix=f"Installed are: {known}")
    app = _load(found[name], did)
    if app.libraries and not any(_is_installed(module) for module in app.libraries):
        wanted = " or ".join(f"`{module}`" for module in app.libraries)
        todo = f'Install it: pip install "{app.install}"' if app.install else "Install it"
        raise LaunchError(did, found=f"{wanted} is not installed in this environment", fix=todo)
    return app


def present_modules(app: App) -> tuple[str, ...]:
    """Those modules of `app.preload` whose package is installed."""
    return tuple(module for module in app.preload if _is_installed(module.partition(".")[0]))


def _load(point: EntryPoint, did: str) -> App:
    try:
        app = point.load()
    except (ImportError, AttributeError) as error:
        raise LaunchError(
            did,
            found=f"its entry point `{point.value}` cannot be loaded: {error}",
            fix="Reinstall the package that ships it, or tell its author",
        ) from error
    if not isinstance(app, App):
        raise LaunchError(
            did,
            found=f"its entry point `{point.value}` is of type {type(app).__name__}",
            fix="Let it name an instance of ddpilot.session.apps.App",
        )
    return app


def _is_installed(module: str) -> bool:
    return find_spec(module) is not None
