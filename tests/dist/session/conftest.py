# SPDX-License-Identifier: Apache-2.0
"""Sessions for tests, and a view that records the output of ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest

from ddpilot import LaunchError, RankError, Session
from ddpilot.output.rich_output import RankMessage
from ddpilot.output.view import View
from tests.dist.launching.scripts import wait_until
from tests.preload import OF_SESSIONS

MODEL = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
num_steps = 0
def step():
    global num_steps
    optimizer.zero_grad()
    model(torch.full((4, 8), rank + 1.0)).sum().backward()
    optimizer.step()
    num_steps += 1
"""
"""A cell with a live DDP model; `step()` trains it by one step."""


HOLD_GIL = """
import ctypes, time
def hold_gil(seconds):
    # Not a sleep, which a signal ends: C++ code that waits for a lock goes on waiting.
    libc, lock, until = ctypes.PyDLL(None), ctypes.create_string_buffer(64), (ctypes.c_long * 2)()
    until[0] = int(time.time() + seconds)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_timedlock(lock, until)
"""
"""A cell that defines an operation in C which holds the GIL, and costs no CPU time."""


class Kept(View):
    """A view that shows nothing and keeps everything; `times_s` has the monotonic time of every error."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """Drop everything kept."""
        self.texts: dict[int, str] = {}
        self.messages: list[RankMessage] = []
        self.raws: dict[int, bytes] = {}
        self.notes: list[str] = []
        self.errors: list[RankError | LaunchError] = []
        self.times_s: list[float] = []
        self.answers: list[str] = []
        self.asked: list[tuple[int, str, bool]] = []

    def make_screen(self) -> NoReturn:
        """Nothing is shown."""
        raise NotImplementedError

    def write_error(self, text: str) -> None:
        """Errors are kept as they are."""

    def begin(self, ranks: Sequence[int]) -> None:
        """Nothing to do."""

    def message(self, message: RankMessage, _now_s: float) -> None:
        """Keep a message, and a stream's text also by rank."""
        self.messages.append(message)
        if message.kind == "stream":
            self.texts[message.rank] = self.texts.get(message.rank, "") + message.content["text"]

    def raw(self, rank: int, _stream: str, data: bytes, _now_s: float) -> None:
        """Keep bytes by rank."""
        self.raws[rank] = self.raws.get(rank, b"") + data

    def error(self, error: RankError | LaunchError) -> None:
        """Keep an error and when it came."""
        self.errors.append(error)
        self.times_s.append(time.monotonic())

    def note(self, text: str) -> None:
        """Keep a note."""
        self.notes.append(text)

    def ask(self, rank: int, prompt: str, password: bool) -> str:
        """Give the next answer."""
        self.asked.append((rank, prompt, password))
        if not self.answers:
            raise EOFError
        return self.answers.pop(0)

    def results(self) -> dict[int, str]:
        """The plain text of the last result of each rank."""
        return {m.rank: m.content["data"]["text/plain"] for m in self.messages if m.kind == "execute_result"}


@pytest.fixture
def view() -> Kept:
    """The view that records the output of the ranks."""
    return Kept()


@pytest.fixture
def start(view: Kept) -> Iterator[Callable[..., Session]]:
    """Starts sessions with the test's view; they are stopped at the end."""
    with contextlib.ExitStack() as stack:

        def start_one(num_ranks: int = 2, **options: Any) -> Session:
            options = {"view": view, "preload": OF_SESSIONS, **options}
            return stack.enter_context(Session(num_ranks, **options))

        yield start_one


def remember_names(session: Session) -> None:
    """Let `forget_variables` keep the variables that there are."""
    session.execute("names_at_start = {*globals(), 'names_at_start'}", quiet=True)


def forget_variables(session: Session) -> None:
    """Delete the variables of earlier tests."""
    session.execute("for name in {*globals()} - names_at_start: del globals()[name]", quiet=True)


@dataclass(frozen=True)
class Lasting:
    """Sessions by their number of ranks, and the view of all of them."""

    view: Kept
    by_size: dict[int, Session]


@pytest.fixture(scope="module")
def lasting() -> Iterator[Lasting]:
    """Sessions of one and of two ranks, for all tests of a file that take `lent`; to start and stop two takes 0.3 s."""
    view = Kept()
    with Session(1, view=view, preload=OF_SESSIONS) as one, Session(2, view=view, preload=OF_SESSIONS) as two:
        for session in (one, two):
            remember_names(session)
        yield Lasting(view, {1: one, 2: two})


@pytest.fixture
def lent(lasting: Lasting, view: Kept) -> Callable[[int], Session]:
    """Lends a lasting session, without the variables of earlier tests. What its ranks said is in `view`, as usual."""

    def lend(num_ranks: int) -> Session:
        session = lasting.by_size[num_ranks]
        forget_variables(session)
        lasting.view.forget()
        vars(view).update(vars(lasting.view))  # the same lists
        return session

    return lend


@contextlib.contextmanager
def stopping_once_noted(session: Session, view: Kept, beginning: str = "") -> Iterator[None]:
    """The session is interrupted as soon as something with that beginning is noted, or after 30 seconds."""

    def stop() -> None:
        try:
            wait_until(lambda: any(note.startswith(beginning) for note in view.notes), limit_s=30)
        finally:
            session.interrupt()

    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        yield
    finally:
        stopper.join()


@contextlib.contextmanager
def pressing_stop(*after_s: float) -> Iterator[None]:
    """Press the stop button after these seconds."""
    timers = [threading.Timer(wait_s, os.kill, (os.getpid(), signal.SIGINT)) for wait_s in after_s]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
