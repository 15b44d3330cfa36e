# SPDX-License-Identifier: Apache-2.0
"""The verbs of `%ddp`. Each calls a method of `Session`, which scripts can call as well."""

from __future__ import annotations

import shlex
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddpilot.diagnose.diagnosis import Diagnosis
from ddpilot.diagnose.doctor import doctor
from ddpilot.findings.text import render_ranks
from ddpilot.magics.parser import MagicParser, add_options, parse_rank, parse_ranks, to_arguments
from ddpilot.magics.push_pull import call_on_ranks, pull_values, push_values
from ddpilot.magics.shell_session import ShellSession, briefly
from ddpilot.output.shared_displays import Publisher
from ddpilot.session.session import Session
from ddpilot.session.status_board import render_board_html, render_board_text

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


def _add_status(parser: MagicParser) -> None:
    """Add the options of `%ddp status`."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--live", action="store_true", help="update the board every second until the ranks are stopped")
    how.add_argument("--stop", action="store_true", help="stop updating it")


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


@dataclass(frozen=True)
class Verb:
    """A verb: its description, its options and the function that runs it."""

    name: str
    does: str
    run: Callable[[ShellSession, Arguments], Any]
    add: Callable[[MagicParser], None] = lambda parser: None
    split: Callable[[str], list[str]] = shlex.split
    """Splits the text after the verb into words."""
    hint: Callable[[str], str] | None = None
    """Returns a suggestion for a word that the verb does not know, or ""."""

    def parser(self) -> MagicParser:
        """Return the parser of the verb's arguments."""
        parser = MagicParser(f"%ddp {self.name}", hint=self.hint, description=f"{self.does[0].upper()}{self.does[1:]}.")
        self.add(parser)
        return parser


def _start(shell_session: ShellSession, given: Arguments) -> None:
    shell_session.start(to_arguments(given))


def _hint_start(word: str) -> str:
    number = word.removeprefix("n").removeprefix("=")
    if number.isdecimal():
        return f"Did you mean `%ddp start -n {number}`?"
    if word in ("--rank", "--ranks"):
        return "All ranks are started; `-n 2` sets their number, and `%%ddp --ranks 0` runs a cell on some of them"
    return ""


def _hint_restart(word: str) -> str:
    if word == "--all":
        return "`%ddp restart` without numbers restarts all ranks"
    return "Give the numbers without an option, as in `%ddp restart 0 1`" if word in ("--rank", "--ranks") else ""


def _restart(shell_session: ShellSession, given: Arguments) -> None:
    session = shell_session.require("restarting ranks")
    ranks = given.get("ranks") or list(range(session.world_size))
    with briefly():
        session.restart(ranks)
    shell_session.report(f"{render_ranks(sorted(set(ranks)))} restarted, with no variables")


def _add_some_ranks(parser: MagicParser) -> None:
    parser.add_argument("ranks", metavar="RANK", nargs="*", type=parse_rank, help="only these ranks; default: all")


def _auto(shell_session: ShellSession, given: Arguments) -> None:
    state = given.get("state")
    if state == "on":
        shell_session.require("sending plain cells to the ranks")
    if state is not None:
        shell_session.is_auto = state == "on"
    where = "on the ranks; `%%ddp --local` runs one in the notebook" if shell_session.is_auto else "in the notebook"
    shell_session.report(f"auto is {'on' if shell_session.is_auto else 'off'}: plain cells run {where}")


def _add_auto(parser: MagicParser) -> None:
    parser.add_argument("state", nargs="?", choices=("on", "off"), default=None, help="default: show the current state")


def _stacks(shell_session: ShellSession, given: Arguments) -> None:
    session = shell_session.require("reading stacks")
    for rank, stack in sorted(session.stacks(given.get("ranks") or None).items()):
        lines = stack.rstrip().split("\n")
        shell_session.write("".join(f"[rank {rank}] {line}\n" for line in lines))


def _interrupt(shell_session: ShellSession, _given: Arguments) -> None:
    if not shell_session.require("interrupting the ranks").interrupt():
        shell_session.report("no cell is running on the ranks")


def _doctor(_shell_session: ShellSession, given: Arguments) -> Diagnosis:
    """Return the diagnosis, which the notebook shows as the value of the line."""
    options = ("nproc_per_node", "num_workers", "checkpoint_dir", "live")
    return doctor(**{name: given[name] for name in options if given.get(name) is not None})


def _add_doctor(parser: MagicParser) -> None:
    parser.add_argument(
        "-n", "--nproc-per-node", metavar="N", type=parse_rank, help="ranks; default: one per GPU, else 2"
    )
    parser.add_argument(
        "--workers", dest="num_workers", metavar="N", type=parse_rank, help="DataLoader workers per rank"
    )
    parser.add_argument("--checkpoint-dir", metavar="PATH", help="folder in which checkpoints will be kept; default: .")
    parser.add_argument("--no-live", dest="live", action="store_false", help="do not start ranks")


def _add_push(parser: MagicParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="+", help="variables of the notebook")
    parser.add_argument("--ranks", metavar="0,2-3", type=parse_ranks, help="to these ranks; default: all live ranks")


def _add_pull(parser: MagicParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="+", help="variables of the ranks, or an expression with --as")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", metavar="R", type=parse_rank, help="from this rank; default: 0")
    which.add_argument("--all", action="store_true", help="from all ranks: a list with each one's value, by rank")
    parser.add_argument("--as", dest="other", metavar="OTHER", help="the variable's name in the notebook")


def _add_run(parser: MagicParser) -> None:
    parser.add_argument("call", metavar="CALL", nargs="+", help="a call, such as train(model, epochs=3)")


VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(
            "start", "start the ranks, which keep running until they are stopped", _start, add_options, hint=_hint_start
        ),
        Verb("stop", "stop the ranks; their variables are lost", lambda shell_session, _: shell_session.stop()),
        Verb(
            "restart",
            "restart ranks under the same numbers; their variables are lost",
            _restart,
            _add_some_ranks,
            hint=_hint_restart,
        ),
        Verb(
            "run",
            "call a function of the notebook on every rank; the results come back by rank",
            call_on_ranks,
            _add_run,
            lambda text: [text] if text and not text.startswith("-") else text.split(),
        ),
        Verb("push", "copy variables of the notebook to the ranks", push_values, _add_push),
        Verb("pull", "copy variables of the ranks to the notebook", pull_values, _add_pull, str.split),
        Verb("status", "show the state, memory and pid of every rank", _show_status, _add_status),
        Verb("auto", "run plain cells on the ranks (on) or in the notebook (off)", _auto, _add_auto),
        Verb("stacks", "show the Python stack of each rank", _stacks, _add_some_ranks),
        Verb("doctor", "check this machine before a job runs, with ranks of its own", _doctor, _add_doctor),
        Verb("interrupt", "interrupt the cell that a different thread runs on the ranks", _interrupt),
    )
}
