# SPDX-License-Identifier: Apache-2.0
"""`python -m MODULE`, and the ranks of its scripts, forked from this process, which has torch.

A launcher or the doctor imports torch, which takes a process of its own 1.5 s. A rank of a script takes 1 s more for
torch's compiler, which its first optimizer imports.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from ddpilot.launching.elastic import rank_main

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NETWORK, _NEW_MOUNTS = 0x40000000, 0x00020000
_RECURSIVE_SLAVE = 0x4000 | 0x80000
_DETACH = 2
_READ_ONCE = ("PYTHON", "TORCH_", "LD_", "EMU_", "DDPILOT_TESTS_")
"""Beginnings of variables that are read when Python starts or torch is imported."""
_OF_RANKS = ("PYTHONPATH", "TORCH_NCCL_", "TORCH_CPP_LOG_LEVEL")
"""Those of them in which a forked rank may differ: its path is set, and the others do nothing on the CPU."""
_SEED = torch.initial_seed()


def start_forked(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    namespace: str = "",
    forks_ranks: bool = True,
    **options: Any,
) -> subprocess.Popen[str]:
    """Run `words`, which begin with `sys.executable, "-m", MODULE`, in the network `namespace` if one is named.

    `options`: those of Popen. The child never gets to the program that Popen is to run. With `forks_ranks` neither do
    ranks of `ddpilot run`, where Python and torch would read the same variables as here.
    """
    forks_ranks = forks_ranks and is_as_here(environ)
    if forks_ranks:
        _import_compiler()

    def be_command() -> None:
        _be_command(words, environ, namespace, forks_ranks)

    return subprocess.Popen(words, env=environ, text=True, preexec_fn=be_command, **options)


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Ranks of scripts that this process starts, as `ddpilot run` does, are forked from it."""
    _import_compiler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess_handler, "Popen", _start_rank)
        yield


def _import_compiler() -> None:
    """Which sets a variable, if it is unset."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", "unused"))
        importlib.import_module("torch._dynamo")


def _start_rank(args: Sequence[str], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """In place of torch's Popen."""
    is_of_script = [*args[:3]] == [sys.executable, "-u", rank_main.__file__]
    # With more threads it would wait for those of this process.
    if is_of_script and env.get("OMP_NUM_THREADS") == "1" and is_as_here(env):
        options["preexec_fn"] = lambda: _be_rank(args, env)
    return subprocess.Popen(args, env=env, **options)


def is_as_here(environ: Mapping[str, str]) -> bool:
    """Whether Python and torch have read here what they would read from `environ`."""
    names = {name for name in {*environ, *os.environ} if name.startswith(_READ_ONCE) and not name.startswith(_OF_RANKS)}
    return all(environ.get(name) == os.environ.get(name) for name in names)


def _be_rank(args: Sequence[str], environ: Mapping[str, str]) -> None:
    """In the child: what Python does with `args`, up to its exit."""
    status = 1
    try:
        _leave_parent()
        gc.enable()
        sys.stdout = io.TextIOWrapper(open(1, "wb", buffering=0, closefd=False), write_through=True)
        os.environ.clear()
        os.environ.update(environ)
        torch.set_num_threads(1)
        random.seed()
        torch.manual_seed(_SEED)
        sys.argv = [*args[2:]]
        more = [each for each in environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
        sys.path[:0] = [os.path.dirname(args[2]), *more]
        status = _status_of([*args[3:]])
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if status == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - shown, and the process ends
        status = 1
        traceback.print_exc()
    finally:
        os._exit(status)


def _status_of(words: list[str]) -> int:
    try:
        rank_main.main(words)
    except SystemExit as ended:
        if not isinstance(ended.code, int) and ended.code is not None:
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # noqa: BLE001 - shown, and the process ends
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _be_command(words: Sequence[str], environ: Mapping[str, str], namespace: str, forks_ranks: bool) -> None:
    """In the child, whose streams are those of the command already."""
    status = 1
    try:
        _leave_parent()
        if namespace:
            _enter(namespace)
        os.environ.clear()
        os.environ.update(environ)
        if "OMP_NUM_THREADS" in environ:  # read when torch is imported; threads of the parent are not there
            torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
        sys.argv = list(words[2:])
        sys.modules.pop(words[2], None)
        if forks_ranks:
            vars(subprocess_handler)["Popen"] = _start_rank
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 - shown, and the process ends
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _leave_parent() -> None:
    """Forget what belongs to the parent: files, signals, and what is to be done at its exit."""
    gc.freeze()
    gc.disable()
    atexit._clear()
    faulthandler.disable()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    resource_tracker._resource_tracker = resource_tracker.ResourceTracker()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    logging.getLogger().handlers.clear()
    for handler in filter(None, (each() for each in logging._handlerList)):  # type: ignore[attr-defined]
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.stderr
    tempfile.tempdir = None


def _enter(namespace: str) -> None:
    """As `ip netns exec` does: the network, and a /sys that shows its interfaces."""
    network = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    _check(namespace, _LIBC.setns(network, _NEW_NETWORK))
    _check(namespace, _LIBC.unshare(_NEW_MOUNTS))
    _check(namespace, _LIBC.mount(b"", b"/", b"none", ctypes.c_ulong(_RECURSIVE_SLAVE), None))
    _check(namespace, _LIBC.umount2(b"/sys", _DETACH))
    _check(namespace, _LIBC.mount(namespace.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None))
    os.close(network)


def _check(namespace: str, status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"entering the namespace {namespace}: {os.strerror(number)}")
