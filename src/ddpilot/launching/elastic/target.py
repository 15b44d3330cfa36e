# SPDX-License-Identifier: Apache-2.0
"""Check script, sizes and addresses before ranks start, so that an error is reported once. Does not import torch."""

from __future__ import annotations

import glob
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import stat
import sys
import tempfile
import traceback
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpilot.errors import LaunchError, did_you_mean
from ddpilot.launching.elastic.options import RunOptions, TargetKind
from ddpilot.launching.elastic.rendezvous.network import Endpoint, open_endpoint, rank_network_variables
from ddpilot.launching.elastic.rendezvous.node_state import NodeState
from ddpilot.launching.rank_environment import LAUNCH_VARIABLE, choose_num_threads, resolve_nproc
from ddpilot.output.writer import LabelledWriter

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
    """Return the name and source of what Python runs for `path`: no source if it is compiled, neither if it cannot run.

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


CPP_LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"
_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_BACKEND_ENTRIES = "torchrun.handlers"  # entry point group in which torch looks for other packages' backends


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A validated run, ready to start.

    `endpoint`: address of the store, None for a rendezvous backend of torch; `variables`: for the ranks' environment,
    in addition to torch's.
    """

    options: RunOptions
    me: NodeState
    run_id: str
    endpoint: Endpoint | None
    variables: Mapping[str, str]
    display: LabelledWriter


def prepare_run(options: RunOptions, environ: Mapping[str, str]) -> PreparedRun:
    """Check everything that can be wrong before ranks start, without importing torch; on node 0, open the port.

    Raises, in less than 3 s, LaunchError (missing script, syntax error, folder that is not writable, no GPU, unusable
    interface) and RendezvousError (a name that does not resolve, a port in use).
    """
    check_target(options.kind, options.target)
    _check_backend(options.rdzv_backend)
    if options.log_dir is not None:
        _check_log_dir(options.log_dir)
    display = LabelledWriter("labelled", None)
    notes: list[str] = []
    count = resolve_nproc(options.nproc_per_node, environ, notes.append, write="-n {}".format)
    if options.kind == "script":
        check_stream(options.target, count, options.max_restarts)
    _check_filter(options, count, notes.append)
    one_node = options.is_static and options.nnodes[1] == 1
    run_id = uuid.uuid4().hex if one_node else options.rdzv_id
    variables = {
        LAUNCH_VARIABLE: run_id,
        "OMP_NUM_THREADS": str(choose_num_threads(environ, count)),
        CPP_LEVEL_VARIABLE: environ.get(CPP_LEVEL_VARIABLE, "WARNING"),  # torch's default, not this process's
    }
    endpoint = open_endpoint(options) if options.is_static else None
    if endpoint is not None:
        try:
            variables |= rank_network_variables(options, endpoint, environ, display.note)
        except BaseException:
            endpoint.close()
            raise
    for note in notes:  # shown only if no error about something else was raised
        display.note(note)
    me = NodeState(
        node_rank=options.node_rank,
        host=platform.node(),
        pid=os.getpid(),
        nnodes=options.nnodes[1],
        nproc_per_node=count,
        target=options.name,
        max_restarts=options.max_restarts,
    )
    return PreparedRun(options=options, me=me, run_id=run_id, endpoint=endpoint, variables=variables, display=display)


def _check_backend(name: str) -> None:
    """Raise LaunchError if torch has no rendezvous backend of that name, including those of installed packages."""
    known = [*_BACKENDS, *sorted(entry.name for entry in importlib.metadata.entry_points(group=_BACKEND_ENTRIES))]
    if name not in known:
        guess = did_you_mean(name, known, show=str)
        fix = f"{guess} Backends are {', '.join(known[:-1])} and {known[-1]}; static is ddpilot's".lstrip()
        raise LaunchError("reading --rdzv-backend", found=f"{name!r}", fix=fix)


def _check_filter(options: RunOptions, count: int, note: Callable[[str], None]) -> None:
    """Raise LaunchError if --local-ranks-filter names a rank that the only node does not have."""
    wanted = options.shown_local_ranks
    if wanted is None or max(wanted) < count:
        return
    given = ",".join(map(str, sorted(wanted)))
    has = f"local rank{'s' * (count > 1)} 0{f' to {count - 1}' * (count > 1)}"
    if options.nnodes[1] == 1:
        fix = "Give local ranks of this node; they count from 0"
        raise LaunchError("reading --local-ranks-filter", found=f"{given}, but the node has {has}", fix=fix)
    if min(wanted) >= count:  # nodes may have different numbers of ranks
        note(f"--local-ranks-filter {given}: this node has {has}, so none of its output is shown")


def _check_log_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LaunchError(
            f"making files in --log-dir {folder}",
            found=f"{type(error).__name__}: {error.strerror or error}",
            fix="Give a folder that can be made and written to",
        ) from error
