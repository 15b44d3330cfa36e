# SPDX-License-Identifier: Apache-2.0
"""What ranks do with decorated functions. Each function runs on every rank; its value goes back as JSON."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ddpilot.group.decorators import on_ranks, rank_zero_only
from ddpilot.group.init_group import init_group
from ddpilot.group.process_group import Group


def decorated(case: str) -> Any:
    """One call of a decorated function in a group of all ranks; what it returned or raised here."""
    with init_group(timeout_s=20) as group:
        calls: list[int] = []
        try:
            value = DECORATED[case](group, calls)
        except BaseException as error:  # noqa: BLE001  (what was raised is the result)
            cause = error.__cause__
            value = [type(error).__name__, str(error), None if cause is None else f"{type(cause).__name__}: {cause}"]
        total = float(group.all_reduce(torch.tensor(1.0)))
        return {"value": value, "calls": calls, "total": total}


class _CannotTravelError(Exception):
    def __reduce__(self) -> str:
        raise TypeError("this exception cannot be pickled")


def _raising(error: BaseException) -> Callable[[Group, list[int]], object]:
    def run(group: Group, calls: list[int]) -> object:
        @on_ranks(1)
        def save() -> None:
            raise error

        return save()

    return run


def _plain(group: Group, calls: list[int]) -> object:
    @rank_zero_only
    def log(text: str, *, times: int) -> str:
        calls.append(group.rank)
        return text * times

    return log("ab", times=2)


def _broadcast(group: Group, calls: list[int]) -> object:
    @on_ranks(1, 0, broadcast=True)
    def load() -> list[int]:
        calls.append(group.rank)
        return [group.rank] * 3

    return load()


def _broadcast_what_cannot(group: Group, calls: list[int]) -> object:
    @on_ranks(0, broadcast=True)
    def load() -> object:
        return threading.Lock()

    return load()


def _nested(group: Group, calls: list[int]) -> object:
    @rank_zero_only
    def log() -> str:
        calls.append(group.rank)
        return "logged"

    @rank_zero_only
    def save() -> str | None:
        return log()

    return save()


def _no_such_rank(group: Group, calls: list[int]) -> object:
    @on_ranks(7)
    def never() -> None:
        calls.append(group.rank)

    return never()


DECORATED: dict[str, Callable[[Group, list[int]], object]] = {
    "plain": _plain,
    "broadcast": _broadcast,
    "broadcast_what_cannot": _broadcast_what_cannot,
    "nested": _nested,
    "no_such_rank": _no_such_rank,
    "value_error": _raising(ValueError("the disk is full")),
    "system_exit": _raising(SystemExit(3)),
    "cannot_travel": _raising(_CannotTravelError("odd")),
}
