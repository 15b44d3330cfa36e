# SPDX-License-Identifier: Apache-2.0
"""Check that the script exists and compiles before ranks start, so that an error is reported only once."""

from __future__ import annotations

import glob
import importlib.machinery
import importlib.util
import os
import shutil
import stat
import sys
import traceback
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ddpilot.errors import LaunchError, did_you_mean
from ddpilot.launching.elastic.options import TargetKind

_NO_SCRIPTS = ("__init__.py", "conftest.py", "setup.py")
"""Files that are not training scripts, and are not proposed."""
LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run")


def check_target(kind: TargetKind, target: str) -> None:
    """Raise LaunchError if `target` does not exist or does not compile. Does not run or import any of it."""
    if kind == "module":
        _check_module(target)
    elif kind == "script" and is_stream(target):
        return  # reading it here would leave nothing for the rank to read
    elif kind == "script":
        _check_script(Path(target))
    elif shutil.which(target) is None:
        fix = "Give the path of a program, or its name where PATH has it; a file needs `chmod +x`"
        raise LaunchError(f"starting `{target}`", found="no such program", fix=fix)


def is_stream(target: str) -> bool:
    """True if `target` can be read only once: a pipe, as in `generate | ddpilot run /dev/stdin`, or a terminal."""
    try:
        mode = os.stat(target).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and not os.path.samefile(target, os.devnull)


def check_stream(target: str, num_ranks: int, max_restarts: int) -> None:
    """Raise LaunchError if `target` is a stream that more than one process would have to read."""
    if num_ranks * (1 + max_restarts) == 1 or not is_stream(target):
        return
    readers = f"{num_ranks} ranks" if num_ranks > 1 else f"{1 + max_restarts} attempts (--max-restarts)"
    raise LaunchError(
        f"starting `{target}`",
        found=f"it is a pipe or a terminal, which only one process can read, and {readers} have to",
        fix="Write the script to a file, or run one rank: -n 1 without --max-restarts",
    )


def _check_script(path: Path) -> None:
    did = f"starting `{path}`"
    if not path.exists():
        raise LaunchError(did, found=f"no such file in {Path.cwd()}", fix=_suggest(path))
    with _errors_explained(did):
        name, source = _read_source(path)
        if name is None:
            kind = "directory" if path.is_dir() else "zip file"
            fix = _name_script(path) if path.is_dir() else "Add one, as `python -m zipapp` does, or name a script"
            raise LaunchError(did, found=f"it is a {kind} without a `__main__.py`", fix=fix)
        if source is not None:
            compile(source, name, "exec", dont_inherit=True)


def _read_source(path: Path) -> tuple[str | None, bytes | None]:
    """The name and source of what Python runs for `path`: no source if it is compiled, and no name if there is none.

    Read here and not by an importer: Python keeps importers by the path as written, and directories of zip files with
    them, so that in another working directory, or after the file was written again, it would look into the old one.
    """
    archive = zipfile.ZipFile(path) if path.is_file() and zipfile.is_zipfile(path) else None
    with archive or nullcontext():
        if archive is None and not path.is_dir():
            return str(path), path.read_bytes()
        members = os.listdir(path) if archive is None else archive.namelist()
        for main in ("__main__.py", "__main__.pyc"):
            if main in members:
                read = archive.read if archive is not None else lambda name: (path / name).read_bytes()
                return str(path / main), read(main) if main.endswith(".py") else None
    return None, None


def _check_source(spec: Any) -> None:
    """Compile the source of a module, which may be in a zip file; compiled modules are not checked."""
    if spec.origin is not None and spec.origin.endswith(".py"):
        compile(spec.loader.get_data(spec.origin), spec.origin, "exec", dont_inherit=True)


@contextmanager
def _errors_explained(did: str) -> Iterator[None]:
    """Context manager that raises LaunchError if Python cannot read or compile a file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks show them
            yield
    except OSError as error:
        raise LaunchError(did, found=f"it cannot be read ({error.strerror})", fix="Check its permissions") from error
    except (SyntaxError, ValueError, zipfile.BadZipFile) as error:
        shown = "".join(traceback.format_exception_only(error)).rstrip()
        raise LaunchError(did, found=f"Python cannot read it\n{shown}", fix="Correct that line") from error


def _suggest(path: Path) -> str:
    if path.name in ("python", "python3", "torchrun", *LAUNCHERS):
        return f"Leave out `{path}`: give the script alone, and ranks start Python by themselves"
    folder = path.parent
    # Only `run` has -m, and a name such as `train.py` is meant as a file.
    module = "" if path.suffix == ".py" or path.parent.name else f"; for a module write `ddpilot run -m {path}`"
    if not folder.is_dir():
        return f"The folder `{folder}` does not exist either{module}"
    deeper = sorted(folder.glob(f"*/{glob.escape(path.name)}"))
    if deeper:
        return f"Did you mean `{deeper[0]}`?"
    names = [each.name for each in folder.iterdir() if not each.name.startswith(".")]
    return did_you_mean(path.name, names, show=lambda name: f"`{folder / name}`") or f"{_name_script(folder)}{module}"


def _name_script(folder: Path) -> str:
    names = sorted(each.name for each in folder.glob("*.py") if each.name not in _NO_SCRIPTS)
    shown = "this folder" if folder == Path() else f"`{folder}`"
    there = f": {shown} has {', '.join(names[:5])}{', ...' * (len(names) > 5)}" if names else ""
    return f"Give the path of a script{there}"


def _check_module(name: str) -> None:
    did = f"starting -m {name}"
    if name in LAUNCHERS:
        fix = "Leave it out: `ddpilot run -n 4 train.py` takes torchrun's options itself"
        raise LaunchError(did, found="that is a launcher too", fix=fix)
    dotted = ".".join(part for part in Path(name.removesuffix(".py")).parts if part not in (os.sep, ".", ".."))
    if name.endswith(".py") or os.sep in name:
        raise LaunchError(did, found="that is a file, not a module", fix=f"Leave out -m, or write -m {dotted}")
    before = list(sys.path)
    importlib.invalidate_caches()  # a module may have been written a moment ago, by a cell
    sys.path.insert(0, os.getcwd())  # searched first, as by `python -m`
    try:
        with _errors_explained(did):
            spec = _find(did, name)
            if spec.submodule_search_locations is not None:
                spec = _find(did, f"{name}.__main__")
            _check_source(spec)
    finally:
        sys.path[:] = before


def _find(did: str, name: str) -> importlib.machinery.ModuleSpec:
    """The module's spec, found without importing its parent packages, which may take seconds or use a GPU."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # this process has imported it under a different name
        spec = None
    here = top
    for part in rest:
        if spec is None:
            break
        here = f"{here}.{part}"
        inside = spec.submodule_search_locations
        spec = None if inside is None else importlib.machinery.PathFinder.find_spec(here, list(inside))
    if spec is None:
        what = "is a package without a `__main__` module" if here.endswith(".__main__") else "was not found"
        raise LaunchError(
            did,
            found=f"`{here.removesuffix('.__main__')}` {what} from {Path.cwd()} by {sys.executable}",
            fix="Run from the folder that holds it, or install it; for a file leave out -m",
        )
    return spec
