# SPDX-License-Identifier: Apache-2.0
"""Compare this node's CLOCK_MONOTONIC with that of rank 0, again and again, while a job runs on several nodes."""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddpilot.environments.detect import detect_topology
from ddpilot.errors import TopologyError
from ddpilot.group.measurements import ClockServer, ask_clock

_EVERY_S = 1.0
_NUM_TRIES = 10
_POLL_S = 0.05
_CONNECT_S = 5.0


def name_clock() -> str:
    """Return what is the same on ranks with one CLOCK_MONOTONIC: it counts from the start of the machine.

    Containers may have a time namespace of their own.
    """
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        namespace = ""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip() + namespace
    except OSError:
        return platform.node()


class ClockMeasurement:
    """On rank 0 a server of its clock; on the first rank of each other node a thread that asks it once a second.

    Does nothing in a job of one node. The ranks meet in the store of the default process group, and no call waits for
    another rank. `write_fact`: called with a name and a value at the end.
    """

    def __init__(self, write_fact: Callable[[str, Any], None]) -> None:
        self._write_fact = write_fact
        self._server: ClockServer | None = None
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._measured: list[tuple[int, int, int]] = []  # time here, offset, error, all in ns

    def start(self) -> None:
        """Call when the default process group exists; calls after the first do nothing."""
        if self._server is not None or self._thread is not None or not dist.is_initialized():
            return
        try:
            topology = detect_topology(os.environ)
        except TopologyError:
            return
        rank = dist.get_rank()
        if topology.nnodes < 2 or (rank and topology.local_rank):
            return
        store = dist.distributed_c10d._get_default_store()
        key = f"ddpilot/clock/{store.add(f'ddpilot/clock/calls/{rank}', 1)}"
        if rank == 0:
            self._server = ClockServer("", time.monotonic)
            store.set(key, json.dumps({"host": socket.gethostname(), "port": self._server.port}))
        else:
            self._thread = threading.Thread(target=self._measure, args=(store, key), name="ddpilot-ask", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Stop, and write what was measured."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_CONNECT_S)
            self._write_fact("clock_offsets", list(self._measured))
        if self._server is not None:
            self._server.close()

    def _measure(self, store: Any, key: str) -> None:
        while not _is_set(store, key):
            if self._is_over.wait(_POLL_S):
                return
        server = json.loads(store.get(key))
        address = os.environ.get("MASTER_ADDR") or server["host"]
        while True:
            with suppress(OSError):  # rank 0 may have ended, or be out of reach: the measured offsets remain
                reply = ask_clock(address, server["port"], _CONNECT_S, clock=time.monotonic, num_tries=_NUM_TRIES)
                nanoseconds = (reply.asked_s * 1e9, reply.offset_s * 1e9, reply.error_s * 1e9)
                self._measured.append((int(nanoseconds[0]), int(nanoseconds[1]), int(nanoseconds[2])))
            if self._is_over.wait(_EVERY_S):
                return


def _is_set(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))  # a blocking call would hold the store's lock
    except RuntimeError:  # the connection is closed: the job ends
        return False
