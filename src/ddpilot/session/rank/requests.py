# SPDX-License-Identifier: Apache-2.0
"""`Requests`: serves the session's own requests to a rank, in its main thread like cells."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpilot.environments.detect import detect_topology
from ddpilot.group.creation import rebuild_group
from ddpilot.group.ddp_models import compare_models, find_models
from ddpilot.group.store import resolve_endpoint
from ddpilot.group.teardown import take_down
from ddpilot.launching.exception_report import user_traceback
from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.memory_file import map_private
from ddpilot.launching.shipping.parcel import importable_from_main, open_parcel, pack_parcel
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.session.protocol.parcels import ParcelPort
from ddpilot.session.protocol.report import Report
from ddpilot.session.rank.error_report import group_state, report_error
from ddpilot.session.rank.interrupts import StopHandler
from ddpilot.session.rank.namespace import RankContext
from ddpilot.session.rank.rebuild import describe_divergence, find_lost
from ddpilot.session.rank.variables import PushedVariables, pack_pulled, prefer_own

_RENDEZVOUS_S = 30.0


class Requests:
    """Serves requests by verb.

    `space`: the rank's state; `path`: the path of the socket for parcels; `freeing`: held while the group is freed.
    """

    def __init__(self, space: RankContext, path: Path, stop_handler: StopHandler, freeing: threading.Lock) -> None:
        self.space = space
        self.generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        """Generation of the group that this rank is in, or enters next."""

        self._stop_handler, self._freeing = stop_handler, freeing
        self._port = ParcelPort(path)
        self._pushed = PushedVariables(space.namespace, space.names)
        self._verbs: dict[str, Callable[..., Any]] = {
            "call": self._call,
            "push": self._push,
            "pull": self._pull,
            "rebuild": self._rebuild,
            "compare": self._compare,
            "finish": lambda: None,
        }

    def serve(self, content: dict[str, Any]) -> Report:
        """Execute the request in `content`. Exceptions are returned in the report."""
        stop_handler = self._stop_handler
        try:
            try:
                stop_handler.arm()
                value = self._verbs[content["verb"]](**content["arguments"])
            finally:
                stop_handler.disarm()
        except BaseException as error:  # noqa: BLE001  # the user's function may raise anything, and the parent is told
            stop_handler.disarm()
            num_collectives = self.space.counter.count()
            return report_error(error, user_traceback(error), time.monotonic(), num_collectives, self.space.device)
        return Report(
            status="ok",
            time_s=time.monotonic(),
            **group_state(),
            num_collectives=self.space.counter.count(),
            value=value,
        )

    def _call(self, token: str) -> None:
        channel, sent = self._port.take(token)
        known: list[Any] = []
        parcel: int | None
        with channel:
            try:
                (function, args, kwargs), known = _open_apart(sent, self.space.names)
                self._pushed.bind(importable_from_main(known))
                value = function(*args, **kwargs)
                parcel, _ = ship("ddpilot-result", {"result": value}, value, did="sending the result", known=known)
            except BaseException as error:
                parcel = _pack_error(error, known)
                raise
            finally:
                _send(channel, parcel)

    def _push(self, token: str) -> dict[str, Any] | None:
        channel, sent = self._port.take(token)
        uses: dict[str, Any] = {}
        with channel:
            values, definitions = _open(sent, uses)
        return self._pushed.put(values, importable_from_main(definitions), uses)

    def _pull(self, token: str, expressions: list[str]) -> dict[str, str] | None:
        channel, _ = self._port.take(token)
        with channel:
            parcel, refusal = pack_pulled(expressions, self.space.namespace)
            _send(channel, parcel)
        return refusal

    def _rebuild(self, generation: int, enter: bool, backend: str | None) -> dict[str, Any]:
        """Leave the current group, if any. With `enter`, enter a new one with all ranks, which is collective."""
        with self._freeing:  # wait until freeing the previous group has finished
            self.generation = generation
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(generation)
        lost = find_lost(self.space.namespace)
        if not enter:
            take_down(healthy=False)
            return {}
        topology = detect_topology(os.environ)
        rebuilt = rebuild_group(
            topology,
            resolve_endpoint(topology, os.environ),
            generation=generation,
            backend=backend,
            rendezvous_s=_RENDEZVOUS_S,
        )
        return {
            "rebound": rebuilt.rebound,
            "unbound": list(rebuilt.unbound),
            "disagreements": list(rebuilt.disagreements),
            "named": describe_divergence(self.space.namespace, rebuilt.group) if rebuilt.disagreements else {},
            "lost": lost,
        }

    def _compare(self) -> dict[str, Any]:
        """Describe the DDP models that differ between ranks. Collective."""
        group = self.space.enter_group()
        models = [model for model in find_models() if model.process_group.size() == group.world_size]
        disagreements = list(compare_models(models, group))
        named = describe_divergence(self.space.namespace, group) if disagreements else {}
        return {"disagreements": disagreements, "named": named}


def _send(channel: socket.socket, parcel: int | None) -> None:
    fds = [] if parcel is None else [parcel]
    try:
        fd_socket.send(channel, None, fds)
    finally:
        fd_socket.close_all(fds)


def _open(parcel: int | None, uses: dict[str, Any]) -> tuple[Any, list[Any]]:
    assert parcel is not None  # the requests that read a parcel are sent with one
    try:
        mapped = map_private(parcel)
    finally:
        os.close(parcel)
    return open_parcel(mapped, uses=uses)


def _open_apart(parcel: int | None, own: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Open a parcel whose functions use globals of their own: the notebook's values, not this rank's variables.

    `own`: the session's names, which keep this rank's values: a `rank` from the notebook would be equal on all ranks.
    """
    main = sys.modules["__main__"]
    apart = sys.modules["__main__"] = types.ModuleType("__main__")
    uses: dict[str, Any] = {}
    try:
        opened = _open(parcel, uses)
        vars(apart).update({**own, **uses, **prefer_own(own, uses)})
        return opened
    finally:
        sys.modules["__main__"] = main


def _pack_error(error: BaseException, known: list[Any]) -> int | None:
    try:
        return pack_parcel("ddpilot-error", error, known)[0]
    except Exception as unpicklable:  # noqa: BLE001  # its text travels all the same
        sys.stderr.write(f"ddpilot: {type(error).__name__} cannot be pickled: {unpicklable}\n")
        return None
