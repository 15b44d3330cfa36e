# SPDX-License-Identifier: Apache-2.0
"""Run the verbs of `%ddp`. Each calls a method of `Session`, which scripts can call as well."""

from __future__ import annotations

import ast
import functools
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddpilot.diagnose.diagnosis import Diagnosis
from ddpilot.diagnose.doctor import doctor
from ddpilot.findings.text import render_ranks
from ddpilot.magics.parser import MagicUsageError, to_arguments
from ddpilot.magics.push_pull import (
    SCOPE,
    call_on_ranks,
    evaluate_call,
    find_function,
    parse_call,
    pull_values,
    push_values,
)
from ddpilot.magics.shell_session import ShellSession, briefly
from ddpilot.output.equal_displays import Publisher
from ddpilot.session.session import Session
from ddpilot.session.status_board import render_board_html, render_board_text

if TYPE_CHECKING:
    from ddpilot.diagnose.ladder.result import ProgramDiagnosis
    from ddpilot.diagnose.verify.result import Verification

_INTERVAL_S = 1.0
_ENDED = "the ranks were stopped"
Arguments = dict[str, Any]


def _show_status(shell_session: ShellSession, given: Arguments) -> None:
    """Show the board; with `live`, start updating it; with `stop`, stop updating it."""
    if given.get("stop"):
        was_live = shell_session.set_board(None)
        shell_session.report(
            "the status board is no longer updated" if was_live else "no status board is being updated"
        )
        return
    session = shell_session.require("reading the ranks' status")
    if shell_session.is_terminal:
        if given.get("live"):
            _follow(session)
        else:
            shell_session.write(f"{_render(session)['text/plain']}\n")
    elif given.get("live"):
        shell_session.set_board(LiveBoard(session, shell_session.shell.display_pub))
    else:
        shell_session.shell.display_pub.publish(_render(session))


class LiveBoard:
    """A display that is updated in place every second by its own thread, also while a cell runs."""

    def __init__(self, session: Session, publisher: Publisher) -> None:
        self._session = session
        self._publisher = publisher
        self._display = {"display_id": f"ddpilot-board-{uuid.uuid4().hex[:12]}"}
        self._end = threading.Event()
        publisher.publish(_render(session), transient=self._display)
        self._thread = threading.Thread(target=self._run, name="ddpilot-board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop updating and leave the display as it is, except that it reports if the ranks were stopped."""
        self._end.set()
        self._thread.join()
        if not self._session.is_running:
            self._update()

    def _run(self) -> None:
        while self._session.is_running and not self._end.wait(_INTERVAL_S):
            self._update()

    def _update(self) -> None:
        self._publisher.publish(_render(self._session), transient=self._display, update=True)


def _render(session: Session) -> dict[str, Any]:
    if not session.is_running:
        return {"text/plain": _ENDED, "text/html": f"<div>{_ENDED}</div>"}
    statuses, now_s = session.status(), time.monotonic()
    return {"text/plain": render_board_text(statuses, now_s), "text/html": render_board_html(statuses, now_s)}


def _follow(session: Session) -> None:
    """Redraw the board in place until Ctrl-C: a terminal cannot show it next to the prompt."""
    num_lines = 0
    try:
        while session.is_running:
            text = _render(session)["text/plain"]
            up = f"\x1b[{num_lines}F\x1b[J" if num_lines else ""
            sys.stdout.write(f"{up}{text}\n")
            sys.stdout.flush()
            num_lines = text.count("\n") + 1
            time.sleep(_INTERVAL_S)
    except KeyboardInterrupt:
        sys.stdout.write("\n")


def _restart(shell_session: ShellSession, given: Arguments) -> None:
    session = shell_session.require("restarting ranks", given.get("ranks"), "%ddp restart")
    ranks = given.get("ranks") or list(range(session.world_size))
    with briefly():
        session.restart(ranks)
    shell_session.report(f"{render_ranks(sorted(set(ranks)))} restarted, with no variables")


def _auto(shell_session: ShellSession, given: Arguments) -> None:
    state = given.get("state")
    if state == "on":
        shell_session.require("sending plain cells to the ranks")
    if state is not None:
        shell_session.is_auto = state == "on"
    where = "on the ranks; `%%ddp --local` runs one in the notebook" if shell_session.is_auto else "in the notebook"
    shell_session.report(f"auto is {'on' if shell_session.is_auto else 'off'}: plain cells run {where}")


def _stacks(shell_session: ShellSession, given: Arguments) -> None:
    ranks = given.get("ranks") or None
    session = shell_session.require("reading stacks", ranks, "%ddp stacks")
    for rank, stack in sorted(session.stacks(ranks).items()):
        lines = stack.rstrip().split("\n")
        shell_session.write("".join(f"[rank {rank}] {line}\n" for line in lines))


def _interrupt(shell_session: ShellSession, _given: Arguments) -> None:
    if not shell_session.require("interrupting the ranks").interrupt():
        shell_session.report("no cell is running on the ranks")


def _doctor(shell_session: ShellSession, given: Arguments) -> Diagnosis | ProgramDiagnosis:
    """Return the diagnosis of the machine, or of a program, which the notebook shows as the value of the line."""
    from ddpilot.diagnose.ladder.ladder import check_program  # imports numpy, as verify does

    names = ("nproc_per_node", "num_workers", "checkpoint_dir", "live")
    options = {name: given[name] for name in names if given.get(name) is not None}
    words = given.get("call")
    if not words:
        return doctor(**options)
    if not options.pop("live", True):
        raise MagicUsageError(
            f"checking `{' '.join(words)}`", found="`--no-live`", fix="Leave it out: a program is checked on ranks"
        )
    if given.get("num_updates") is not None:
        options["num_updates"] = given["num_updates"]
    options["show"] = shell_session.report
    if ".py" in words[0] and "(" not in words[0]:
        with briefly():
            return check_program(words[0], *words[1:], **options)
    fn, args, kwargs = _find_function(shell_session, " ".join(words), given[SCOPE], "checking")
    with briefly():
        return check_program(functools.partial(fn, *args, **kwargs) if args or kwargs else fn, **options)


def _find_function(
    shell_session: ShellSession, text: str, names: dict[str, Any], doing: str
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the function that a line names, with arguments: of the notebook, or else of rank 0 of the session.

    `doing`: how the message of an error begins.
    """
    is_name = text.replace(".", "").isidentifier()
    call = parse_call(f"{text}()" if is_name else text, "%ddp doctor train(epochs=1)")
    if isinstance(call.func, ast.Name):
        name = call.func.id
        names = {**names, name: find_function(shell_session, {"name": name, SCOPE: names}, doing)}
    fn, args, kwargs = evaluate_call(call, names)
    if not callable(fn):
        found = f"`{ast.unparse(call.func)}` is a {type(fn).__name__}"
        raise MagicUsageError(f"{doing} `{text}`", found=found, fix="Name a function that trains")
    return fn, args, kwargs


def _verify(shell_session: ShellSession, given: Arguments) -> Verification:
    """Return the verification, which the notebook shows as the value of the line."""
    from ddpilot.diagnose.verify.verify import verify

    options = ("nproc_per_node", "num_updates", "timeout_s")
    kept = {name: given[name] for name in options if given.get(name) is not None}
    fn, args, kwargs = _find_function(shell_session, given["name"], given[SCOPE], "verifying")
    called = functools.partial(fn, *args, **kwargs) if args or kwargs else fn
    return verify(called, show=shell_session.report, **kept)


def _start(shell_session: ShellSession, given: Arguments) -> None:
    """Start the ranks. Returns nothing: the notebook would show a session under the line."""
    shell_session.start(to_arguments(given))


COMMANDS: dict[str, Callable[[ShellSession, Arguments], Any]] = {
    "start": _start,
    "stop": lambda shell_session, _: shell_session.stop(),
    "restart": _restart,
    "run": call_on_ranks,
    "push": push_values,
    "pull": pull_values,
    "status": _show_status,
    "auto": _auto,
    "stacks": _stacks,
    "doctor": _doctor,
    "verify": _verify,
    "interrupt": _interrupt,
}
"""By verb: the function that runs it, with the arguments that `VERBS` describes."""
