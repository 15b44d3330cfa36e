# SPDX-License-Identifier: Apache-2.0
"""`Requests`: serves the requests of the parent in the main thread of a rank, as cells are."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import types
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
from ddpilot.launching.shipping.pickling import importable_from_main, open_parcel, pack_parcel
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.session.protocol.large_values import ParcelPort
from ddpilot.session.protocol.messages import Call, Compare, Pull, Push, Rebuild, Report, Request
from ddpilot.session.rank.error_report import group_state, report_error
from ddpilot.session.rank.interrupts import InterruptHandler
from ddpilot.session.rank.model_differences import describe_divergence, find_lost
from ddpilot.session.rank.namespace import RankContext
from ddpilot.session.rank.push_pull import PushedVariables, pack_pulled, prefer_own

_RENDEZVOUS_S = 30.0


class Requests:
    """Serves requests of the parent.

    `context`: the rank's state; `path`: the path of the socket for parcels; `freeing`: held while the group is freed.
    """

    def __init__(
        self, context: RankContext, path: Path, interrupt_handler: InterruptHandler, freeing: threading.Lock
    ) -> None:
        self.context = context
        self.generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        """Generation of the group that this rank is in, or enters next."""

        self._interrupt_handler, self._freeing = interrupt_handler, freeing
        self._port = ParcelPort(path)
        self._pushed = PushedVariables(context.namespace, context.names)

    def serve(self, request: Request) -> Report:
        """Execute `request`. Exceptions are returned in the report."""
        interrupt_handler = self._interrupt_handler
        try:
            try:
                interrupt_handler.arm()
                value = self._execute(request)
            finally:
                interrupt_handler.disarm()
        except BaseException as error:  # noqa: BLE001  # the user's function may raise anything; the report has it
            interrupt_handler.disarm()
            num_collectives = self.context.count_collectives()
            return report_error(error, user_traceback(error), time.monotonic(), num_collectives, self.context.device)
        return Report(**group_state(), num_collectives=self.context.count_collectives(), value=value)

    def _execute(self, request: Request) -> Any:
        if isinstance(request, Call):
            return self._call(request)
        if isinstance(request, Push):
            return self._push(request)
        if isinstance(request, Pull):
            return self._pull(request)
        if isinstance(request, Rebuild):
            return self._rebuild(request)
        return self._compare() if isinstance(request, Compare) else None

    def _call(self, request: Call) -> None:
        channel, sent = self._port.take(request.token)
        known: list[Any] = []
        parcel: int | None
        with channel:
            try:
                (function, args, kwargs), known = _open_isolated(sent, self.context.names)
                self._pushed.bind(importable_from_main(known))
                value = function(*args, **kwargs)
                parcel, _ = ship("ddpilot-result", {"result": value}, value, did="sending the result", known=known)
            except BaseException as error:
                parcel = _pack_error(error, known)
                raise
            finally:
                _send(channel, parcel)

    def _push(self, request: Push) -> dict[str, Any] | None:
        channel, sent = self._port.take(request.token)
        uses: dict[str, Any] = {}
        with channel:
            values, definitions = _open(sent, uses)
        return self._pushed.put(values, importable_from_main(definitions), uses)

    def _pull(self, request: Pull) -> dict[str, str] | None:
        channel, _ = self._port.take(request.token)
        with channel:
            parcel, refusal = pack_pulled(request.expressions, self.context.namespace)
            _send(channel, parcel)
        return refusal

    def _rebuild(self, request: Rebuild) -> dict[str, Any]:
        """Leave the current group, if any. With `enter`, enter a new one with all ranks, which is collective."""
        with self._freeing:  # wait until freeing the previous group has finished
            self.generation = request.generation
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(request.generation)
        lost = find_lost(self.context.namespace)
        if not request.enter:
            take_down(healthy=False)
            return {}
        topology = detect_topology(os.environ)
        rebuilt = rebuild_group(
            topology,
            resolve_endpoint(topology, os.environ),
            generation=request.generation,
            backend=request.backend,
            rendezvous_s=_RENDEZVOUS_S,
        )
        return {
            "rebound": rebuilt.rebound,
            "unbound": list(rebuilt.unbound),
            "disagreements": list(rebuilt.disagreements),
            "named": describe_divergence(self.context.namespace, rebuilt.group) if rebuilt.disagreements else {},
            "lost": lost,
        }

    def _compare(self) -> dict[str, Any]:
        """Describe the DDP models that differ between ranks. Collective."""
        group = self.context.enter_group()
        models = [model for model in find_models() if model.process_group.size() == group.world_size]
        disagreements = list(compare_models(models, group))
        named = describe_divergence(self.context.namespace, group) if disagreements else {}
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


def _open_isolated(parcel: int | None, own: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Open a parcel whose functions use globals of their own: the notebook's values, not this rank's variables.

    `own`: the session's names, which keep this rank's values: a `rank` from the notebook would be equal on all ranks.
    """
    main = sys.modules["__main__"]
    isolated = sys.modules["__main__"] = types.ModuleType("__main__")
    uses: dict[str, Any] = {}
    try:
        opened = _open(parcel, uses)
        vars(isolated).update({**own, **uses, **prefer_own(own, uses)})
        return opened
    finally:
        sys.modules["__main__"] = main


def _pack_error(error: BaseException, known: list[Any]) -> int | None:
    try:
        return pack_parcel("ddpilot-error", error, known)[0]
    except Exception as unpicklable:  # noqa: BLE001  # the report has its text
        sys.stderr.write(f"ddpilot: {type(error).__name__} cannot be pickled: {unpicklable}\n")
        return None
