# SPDX-License-Identifier: Apache-2.0
"""The calls that lead to a line of which no stack is known, as far as the user's source leaves only one way."""

from __future__ import annotations

from ddpilot.watch.source import Sources
from ddpilot.watch.stacks import Chain
from ddpilot.watch.view import Frame

_MAX_CALLERS = 8


def complete(chain: Chain, sources: Sources, others: Chain = ()) -> Chain:
    """`chain`, and where it is a single line also the callers that can only be, as the source has it.

    `others`: the calls of other ranks. A function that is not called in its own file may be called in one of theirs.
    """
    if len(chain) != 1:
        return chain
    found = _within_file(chain, sources)
    if found[0].function in ("", "<module>"):
        return found
    at = _find_call(found[0], others, sources)
    return found if at is None else (*others[: at[0]], at[1], *found)


def _within_file(chain: Chain, sources: Sources) -> Chain:
    found = list(chain)
    source = sources.find(chain[0])
    while source is not None and found[0].function not in ("", "<module>") and len(found) < _MAX_CALLERS:
        wrappers = source.wrappers_of(_name(found[0]))
        callers = {caller.line: caller for caller in source.calls_of(_name(found[0]))}
        if len(callers) != 1:
            break
        outer = [*callers.values(), *wrappers]
        found[:0] = [Frame(chain[0].file, each.line, each.function, each.text) for each in outer]
    return tuple(found)


def _find_call(callee: Frame, others: Chain, sources: Sources) -> tuple[int, Frame] | None:
    """Which of the functions that `others` are in calls the one of `callee`, and at which line; None unless just one.

    Of calls that stand one behind the other, as of a loss and an accuracy, the first.
    """
    found = []
    for number, frame in enumerate(others):
        source = sources.find(frame)
        calls = source.calls_of(_name(callee)) if source is not None and frame.file != callee.file else []
        lines = sorted((call for call in calls if call.function == _name(frame)), key=lambda call: call.line)
        if not lines or source is None:
            continue
        around = {tuple((id(block.node), block.part) for block in source.blocks(call.line)) for call in lines}
        if len(around) > 1 or lines[0].line < frame.line < lines[-1].line:
            return None
        found.append((number, Frame(frame.file, lines[0].line, frame.function, lines[0].text)))
    return found[0] if len(found) == 1 else None


def _name(frame: Frame) -> str:
    return frame.function.rpartition(".")[2]
