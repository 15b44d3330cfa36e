# SPDX-License-Identifier: Apache-2.0
"""`App`: how a training library prepares each rank of a session.

To add one, declare an `App` and name it in the entry-point group "ddpilot.apps". The module that declares it is also
imported in the notebook, so its top level must import neither the library nor torch.
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
    """The state of a rank, as passed to an app's functions."""

    rank: int
    """0 to `world_size` - 1."""
    world_size: int
    """Number of ranks of the session."""
    local_rank: int
    """The rank's number on this node."""
    device: Any
    """The `torch.device` of this rank, already set as the current device."""
    namespace: dict[str, Any]
    """The rank's ``__main__``: the variables that cells read and set."""
    verbose: bool
    """True if the session was started with `verbose`."""
    seed: int | None
    """The seed that every rank was started with; None if each rank has a random seed of its own."""
    enter_group: Callable[[], Any]
    """Returns this rank's `Group`. Enters the process group if the rank is not in one, which is collective."""
    is_everywhere: Callable[[], bool]
    """Returns True if the current cell or request runs on every rank. On a subset of ranks a collective would hang."""
    cleanup: ExitStack
    """Callbacks registered here run when the session ends, after the finalizers, in reverse order."""


@dataclass(frozen=True, kw_only=True)
class App:
    """Functions to run on every rank of a session that is started with the app's name.

    - `initializer` runs once on each rank, before its first cell.
    - `after_cell` runs after every cell, once the cell's result has been sent.
    - `finalizer` runs when the session ends.

    All of them run in the rank's main thread. An exception in `initializer` fails the start of the session. Exceptions
    in the other two are printed by the rank.
    """

    name: str
    """The name passed to `Session(apps=...)`, which is also the name of the entry point."""
    libraries: tuple[str, ...] = ()
    """Import names of the library, at least one of which must be installed. (): no check."""
    install: str = ""
    """The pip requirement to suggest if none of `libraries` is installed, such as "ddpilot[fastai]"."""
    preload: tuple[str, ...] = ()
    """Modules to import once in the process that forks the ranks, if they are installed.

    Leave out modules that inspect the environment, IPython or the GPUs on import: ranks would inherit the result.
    """
    imports: tuple[str, ...] = ()
    """Statements to execute in each rank's namespace."""
    initializer: Callable[[AppContext], None] | None = None
    finalizer: Callable[[AppContext], None] | None = None
    after_cell: Callable[[AppContext], None] | None = None


def find_app(name: str) -> App:
    """Return the app that is installed under `name`.

    Raises LaunchError if no app has that name, if its entry point cannot be loaded, or if its library is not installed.
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
    """Return the modules of `app.preload` whose package is installed."""
    return tuple(module for module in app.preload if _is_installed(module.partition(".")[0]))


def _load(point: EntryPoint, did: str) -> App:
    try:
        app = point.load()
    except (ImportError, AttributeError) as error:
        raise LaunchError(
            did,
            found=f"its entry point `{point.value}` cannot be loaded: {error}",
            fix="Reinstall the package that ships it, or report this to its author",
        ) from error
    if not isinstance(app, App):
        raise LaunchError(
            did,
            found=f"its entry point `{point.value}` is of type {type(app).__name__}",
            fix="It must name an instance of ddpilot.App",
        )
    return app


def _is_installed(module: str) -> bool:
    return find_spec(module) is not None
