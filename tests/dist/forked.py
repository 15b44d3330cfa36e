# SPDX-License-Identifier: Apache-2.0
"""`python -m MODULE`, forked from this process, which has torch.

A launcher or the doctor imports torch, which takes a process of its own 1.5 s.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from typing import Any

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NETWORK, _NEW_MOUNTS = 0x40000000, 0x00020000
_RECURSIVE_SLAVE = 0x4000 | 0x80000
_DETACH = 2


def start_forked(
    words: Sequence[str], environ: Mapping[str, str], *, namespace: str = "", **options: Any
) -> subprocess.Popen[str]:
    """Run `words`, which begin with `sys.executable, "-m", MODULE`, in the network `namespace` if one is named.

    `options`: those of Popen. The child never gets to the program that Popen is to run.
    """
    return subprocess.Popen(
        words, env=environ, text=True, preexec_fn=lambda: _be_command(words, environ, namespace), **options
    )


def _be_command(words: Sequence[str], environ: Mapping[str, str], namespace: str) -> None:
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
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
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
