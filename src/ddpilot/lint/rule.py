# SPDX-License-Identifier: Apache-2.0
"""Interface of rules and their reports. Rules are registered by the decorator `rule`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ddpilot.lint.program import Program, argument, has_unknown_arguments, is_constant
from ddpilot.lint.rank_flow import RankFlow, collective_of
from ddpilot.lint.scopes import Loop
from ddpilot.module_names import INIT_GROUP

OUR_INIT = INIT_GROUP.replace(":", ".")
Edit = tuple[str, str]
"""A fix: the name of the change (see `fixes`), and its argument."""


@dataclass(frozen=True)
class Report:
    """One place at which a rule found its fault."""

    node: ast.AST
    message: str
    edit: Edit | None = None
    """The fix that `--fix` makes at `node`; None if there is no safe one."""


class Facts:
    """A program and what several rules ask about it; each answer is computed once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.flow = RankFlow(program)

    @cached_property
    def wraps(self) -> list[ast.Call]:
        """The calls of DistributedDataParallel."""
        return self.program.calls_to("DDP")

    @cached_property
    def inits(self) -> list[ast.Call]:
        """The calls of init_process_group, without those of one rank and of "fake" and "xla"."""
        calls = self.program.calls_to("torch.distributed.init_process_group", OUR_INIT)
        return [call for call in calls if not self._is_for_one_rank(call)]

    def _is_for_one_rank(self, call: ast.Call) -> bool:
        size, rank, backend = (argument(call, -1, name) for name in ("world_size", "rank", "backend"))
        backend = backend if backend is not None else call.args[0] if call.args else None
        return is_constant(backend, "fake", "xla") or is_constant(size, 1) or is_constant(rank, 0)

    @cached_property
    def is_distributed(self) -> bool:
        """True if the program itself creates a process group or wraps a model by DDP."""
        return bool(self.wraps or self.inits)

    @cached_property
    def collectives(self) -> list[tuple[str, ast.Call]]:
        """The collectives of the default group, with their names."""
        if not self.program.imports & {"torch", "accelerate", "lightning", "lightning_fabric"}:
            return []
        calls = [call for some in self.program.calls.values() for call in some]
        named = {call: collective_of(self.program, call) for call in calls}
        return sorted(((n, c) for c, n in named.items() if n), key=lambda each: (each[1].lineno, each[1].col_offset))

    @cached_property
    def collectives_of_tensors(self) -> bool:
        """True if the program reduces or exchanges tensors itself, apart from barriers."""
        return any(name not in ("barrier", "monitored_barrier") for name, _ in self.collectives)

    def is_ddp(self, node: ast.AST) -> bool:
        """Return True if `node` may be a DDP wrapper; False if it may be unwrapped by ``.module`` on the way."""
        traced = self.program.trace(node)
        if any(_is_unwrapped(each) for each in traced):
            return False
        return any(isinstance(each, ast.Call) and self.program.name_of(each) == "DDP" for each in traced)

    @cached_property
    def forwards(self) -> dict[ast.Call, None]:
        """The calls of DDP wrappers, as in ``model(x)``."""
        if not self.wraps:
            return {}
        calls = (call for call in self.program.nodes[ast.Call] if isinstance(call, ast.Call))
        return dict.fromkeys(call for call in calls if self._is_forward(call.func))

    def _is_forward(self, function: ast.expr) -> bool:
        if not isinstance(function, (ast.Name, ast.Attribute, ast.Subscript)):
            return False
        if self.program.name_of(function) or (isinstance(function, ast.Attribute) and function.attr == "module"):
            return False
        return self.is_ddp(function)

    @cached_property
    def step_loops(self) -> list[Loop]:
        """The innermost loops that run a backward pass, directly or through functions of this file."""
        program = self.program
        found: dict[Loop, None] = {}
        for call in [*program.calls_to(".backward"), *self._accelerate_backwards]:
            for loop in self._loops_reaching(call):
                found.setdefault(loop)
        return list(found)

    @cached_property
    def _accelerate_backwards(self) -> list[ast.Call]:
        return []

    def _loops_reaching(self, node: ast.AST, depth: int = 3) -> Iterator[Loop]:
        loops = self.program.loops_of(node)
        if loops:
            yield loops[0]
        elif depth:
            for site in self.program.call_sites(self.program.function_of(node)):
                yield from self._loops_reaching(site, depth - 1)

    def trains_ddp(self, loop: Loop) -> bool:
        """Return True if a DDP wrapper is called in `loop`, directly or through functions of this file."""
        return any(call in self.forwards for call in self.program.calls_inside(loop))

    def loaders_of(self, loop: Loop) -> list[ast.Call]:
        """Return the calls of DataLoader whose result `loop` may iterate over."""
        sources = [] if isinstance(loop, ast.While) else list(iterated(loop.iter))
        for call in self.program.inside(loop, ast.Call):
            if isinstance(call, ast.Call) and self.program.name_of(call) == "next" and call.args:
                sources.append(call.args[0])
        return [call for each in sources for name, call in self.program.made_by(each) if name == "DataLoader"]

    @cached_property
    def is_script(self) -> bool:
        """True if the file is run: it has a main guard, calls a function at its top level, or is a notebook."""
        if self.program.cells or "if __name__ ==" in self.program.text:
            return True
        body = self.program.tree.body
        calls = any(isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) for each in body)
        return calls or any(isinstance(each, (ast.For, ast.While)) for each in body)


def iterated(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the iterables behind `enumerate`, `zip`, `tqdm` and similar around them."""
    if isinstance(node, ast.Call) and not has_unknown_arguments(node) and node.args:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("enumerate", "zip", "tqdm", "islice", "iter", "track", "log_every", "trange"):
            for each in node.args:
                yield from iterated(each)
            return
    yield node


def _is_unwrapped(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
        return True
    return isinstance(node, ast.Attribute) and node.attr == "module"


Check = Callable[[Facts], Iterator[Report]]


@dataclass(frozen=True)
class Rule:
    """A check with the code of the finding that it reports."""

    code: str
    check: Check = field(compare=False)
    is_fixable: bool = False

    @property
    def summary(self) -> str:
        """The first line of the check's docstring: what is reported."""
        return (self.check.__doc__ or "").partition("\n")[0]


def rule(code: str, *, is_fixable: bool = False) -> Callable[[Check], Rule]:
    """Make a check a rule that reports `code`."""
    return lambda check: Rule(code, check, is_fixable)
