# SPDX-License-Identifier: Apache-2.0
"""Decorators that run a function on some ranks and propagate its exceptions to all ranks. Does not import torch."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import cloudpickle

from ddpilot.environments.detect import detect_topology
from ddpilot.errors import GroupError, RemoteRankError

P = ParamSpec("P")
T = TypeVar("T")

_inside: ContextVar[bool] = ContextVar("ddpilot_inside_on_ranks", default=False)


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate `function` to run on rank 0 only; other ranks get None. Calls are collective, as with `on_ranks(0)`."""
    return on_ranks(0)(function)


def on_ranks(*ranks: int, broadcast: bool = False) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Decorate a function to run on `ranks` only; it returns None on the other ranks.

    `broadcast`: return the value of the first of `ranks` on every rank instead; it must be picklable.

    In a process group every call is **collective**: all ranks call it, and wait until `ranks` have finished. Do not put
    the call under `if rank == 0`. Within such a function, calls of other decorated functions are not collective. An
    exception is raised on every rank. On the other ranks it is a RemoteRankError with the type, text and rank of the
    original, which is its `__cause__` if it can be pickled.

    Without a process group, the topology determines which ranks run the function, and nothing is exchanged. In a single
    process and in a group of one rank it always runs. Raises GroupError for a rank that is not in the group, and for
    `broadcast` among several ranks without a group. On decoration, raises GroupError for no ranks, negative ranks,
    generators and coroutines.
    """
    if not ranks or any(type(rank) is not int or rank < 0 for rank in ranks):
        raise GroupError("decorating with on_ranks", found=f"ranks {ranks}", fix="Pass ranks, counted from 0.")

    def decorate(function: Callable[P, T]) -> Callable[P, T | None]:
        _refuse_deferred(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
            body = functools.partial(function, *args, **kwargs)
            dist = sys.modules.get("torch.distributed")
            if dist is None or not dist.is_available() or not dist.is_initialized():
                return _without_group(body, ranks, broadcast)
            if dist.get_world_size() == 1:
                return body()
            _check_ranks(ranks, dist.get_world_size())
            if _inside.get():
                return body() if dist.get_rank() in ranks else None
            return _in_group(body, ranks, broadcast, dist)

        return call

    return decorate


@dataclass(frozen=True)
class _Failure:
    """An exception to send to the other ranks."""

    rank: int
    text: str
    """Type name and message."""
    pickled: bytes | None
    """The result of `pickled` for the exception."""


def _in_group(body: functools.partial[T], ranks: tuple[int, ...], broadcast: bool, dist: Any) -> T | None:
    rank, value, shipped = dist.get_rank(), None, None
    error: BaseException | None = None
    if rank in ranks:
        token = _inside.set(True)
        try:
            value = body()
            # Pickled here and not during the broadcast, where a failure would leave the other ranks waiting.
            shipped = cloudpickle.dumps(value) if broadcast and rank == ranks[0] else None
        except BaseException as caught:  # noqa: BLE001  (the other ranks wait, whatever it is; raised below)
            error = caught
        finally:
            _inside.reset(token)
    failures: list[_Failure | None] = [None] * dist.get_world_size()
    dist.all_gather_object(
        failures, None if error is None else _Failure(rank, f"{type(error).__name__}: {error}", pickled(error))
    )
    if error is not None:
        raise error
    if (first := next((failure for failure in failures if failure is not None), None)) is not None:
        raise _remote_error(body.func.__name__, first, rank) from unpickled(first.pickled)
    if not broadcast:
        return value
    carrier = [shipped]
    dist.broadcast_object_list(carrier, ranks[0])
    return value if rank == ranks[0] else cast(T, pickle.loads(cast(bytes, carrier[0])))


def _without_group(body: functools.partial[T], ranks: tuple[int, ...], broadcast: bool) -> T | None:
    topology = detect_topology(os.environ)
    if not topology.is_distributed:
        return body()
    _check_ranks(ranks, topology.world_size)
    if broadcast and topology.world_size > 1:
        raise GroupError(
            f"calling {body.func.__name__}() on ranks {ranks} with broadcast=True",
            found="there is no process group yet to send the value through",
            fix="Call init_group() first.",
            rank=topology.rank,
        )
    return body() if topology.rank in ranks else None


def pickled(error: BaseException) -> bytes | None:
    """Return the pickled exception; None if it cannot be pickled."""
    try:
        shipped: bytes = cloudpickle.dumps(error)
    except Exception:  # noqa: BLE001  (pickling runs the user's code; the text travels in any case)
        return None
    return shipped


def unpickled(shipped: bytes | None) -> BaseException | None:
    """Return the exception that `pickled` was called with; None if it cannot be unpickled."""
    try:
        found = None if shipped is None else pickle.loads(shipped)
    except Exception:  # noqa: BLE001  (unpickling runs the user's code; the text is there in any case)
        return None
    return found if isinstance(found, BaseException) else None


def _remote_error(name: str, failure: _Failure, rank: int) -> RemoteRankError:
    return RemoteRankError(
        f"calling {name}(), which runs on rank {failure.rank}",
        found=f"rank {failure.rank} raised {failure.text}",
        fix=f"See rank {failure.rank}'s traceback; this rank raises too.",
        rank=rank,
    )


def _check_ranks(ranks: tuple[int, ...], world_size: int) -> None:
    if beyond := [rank for rank in ranks if rank >= world_size]:
        raise GroupError(
            f"calling a function on ranks {ranks}",
            found=f"rank {beyond[0]} does not exist: the group has ranks 0 to {world_size - 1}",
            fix="Name ranks of the group, or start more ranks.",
        )


def _refuse_deferred(function: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise GroupError(
            f"decorating {function.__name__}() with on_ranks",
            found="it is a generator or a coroutine, whose body runs later than the call",
            fix="Decorate a function that does its work before it returns.",
        )
