# SPDX-License-Identifier: Apache-2.0
"""What a name may stand for, and which conditions depend on the rank."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ddpilot.lint.linter import lint_text
from ddpilot.lint.program import Program
from ddpilot.lint.rank_flow import RankFlow

NOISE = sorted(Path(__file__).parent.glob("fixtures/*/noise_*.py"))
HEAD = """import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from functools import partial
"""
WRAPPED = {
    "an alias": "W = DDP\nx = W(m)\nASK(x)",
    "a module": "x = nn.parallel.DistributedDataParallel(m)\nASK(x)",
    "a star": "from torch.nn.parallel import *\nx = DistributedDataParallel(m)\nASK(x)",
    "partial": "make = partial(DDP, bucket_cap_mb=1)\nASK(make(m))",
    "a subclass": "class Mine(DDP):\n    pass\nx = Mine(m)\nASK(x)",
    "a function": "def wrap(m):\n    return DDP(m)\nx = wrap(m)\nASK(x)",
    "a tuple": "def make(m):\n    return DDP(m), 1\nx, y = make(m)\nASK(x)",
    "a parameter": "def use(x):\n    ASK(x)\nuse(DDP(m))",
    "a keyword": "def use(*, x=None):\n    ASK(x)\nuse(x=DDP(m))",
    "an attribute": "class A:\n    def __init__(self):\n        self.x = DDP(m)\n    def f(self):\n     ASK(self.x)",
    "an instance": "class A:\n    def __init__(self):\n        self.x = DDP(m)\na = A()\nASK(a.x)",
    "a base": "class A:\n    def g(self):\n        self.x = DDP(m)\nclass B(A):\n    def f(self):\n     ASK(self.x)",
    "a property": "class A:\n    @property\n    def x(self):\n     return DDP(m)\n    def f(self):\n     ASK(self.x)",
    "a dictionary": "d = {'x': DDP(m)}\nASK(d['x'])",
    "a condition": "x = m\nif several:\n    x = DDP(x)\nASK(x)",
    "an expression": "x = DDP(m) if several else m\nASK(x)",
    "its methods": "x = torch.compile(DDP(m).train())\nASK(x)",
    "spawn": "def use(rank, x):\n    ASK(x)\ntorch.multiprocessing.spawn(use, args=(DDP(m),))",
    "the same name": "model = m\nmodel = DDP(model)\ndef f():\n    ASK(model)",
}
PLAIN = {
    "assigned again": "x = DDP(m)\nx = m\nASK(x)",
    "another branch": "if several:\n    x = DDP(m)\nelse:\n    x = m\n    ASK(x)",
    "another class": "class A:\n    def f(self):\n     self.x = DDP(m)\nclass B:\n    def f(self):\n     ASK(self.x)",
    "later": "x = m\nASK(x)\nx = DDP(m)",
    "itself": "x = x\ndef f(a):\n    return f(a)\nASK(f(x))",
    "another library's": "from apex.parallel import DistributedDataParallel as DDP\nx = DDP(m)\nASK(x)",
}
DIFFERS = (
    *("rank == 0", "not rank", "dist.get_rank() != 0", "args.local_rank in (0, 1)", "is_main", "self.is_chief"),
    *("int(os.environ['RANK']) == 0", "os.getenv('LOCAL_RANK') == '0'", "ready and rank == 0", "first()", "mine"),
)
IS_SAME = (
    *(
        "rank == -1",
        "args.local_rank != -1",
        "rank is None",
        "rank >= 0",
        "'RANK' in os.environ",
        "ddp",
        "step % 10 == 0",
    ),
    *(
        "dist.get_world_size() > 1",
        "dist.is_initialized()",
        "other == 2",
        "flag",
        "control.should_stop",
        "lora_rank == 4",
    ),
)
DEFINITIONS = """
rank = int(os.environ["RANK"])
ddp = int(os.environ.get("RANK", -1)) != -1
mine = rank == 0
flag = torch.tensor(rank == 0)
dist.broadcast(flag, src=0)
for other in range(4):
    pass
class A:
    def __init__(self):
        self.is_chief = dist.get_rank() == 0
def first():
    return dist.get_rank() == 0
"""


def asked(text: str) -> tuple[Program, ast.expr]:
    """The program, and what stands in ``ASK(...)``."""
    program = Program(HEAD + text)
    calls = (node for node in ast.walk(program.tree) if isinstance(node, ast.Call))
    return program, next(call.args[0] for call in calls if getattr(call.func, "id", "") == "ASK")


@pytest.mark.parametrize("text", WRAPPED.values(), ids=WRAPPED)
def test_trace_finds_the_wrapper(text: str) -> None:
    """Through whatever a file does with it."""
    program, value = asked(text)
    assert program.is_made_by(value, "DDP")


@pytest.mark.parametrize("text", PLAIN.values(), ids=PLAIN)
def test_trace_does_not_find_what_cannot_be(text: str) -> None:
    """Values that were replaced, of other branches and of other classes."""
    program, value = asked(text)
    assert not program.is_made_by(value, "DDP")


@pytest.mark.parametrize(("tests", "differs"), [(DIFFERS, True), (IS_SAME, False)])
def test_condition_differs_between_ranks(tests: tuple[str, ...], differs: bool) -> None:
    """A comparison with None or -1 asks only whether there are ranks."""
    for test in tests:
        program, value = asked(f"{DEFINITIONS}\nclass C(A):\n    def f(self):\n        ASK({test})\n")
        assert RankFlow(program).differs(value) is differs, test


RENAMED = {
    "model": "m0",
    "ddp": "m1",
    "wrapped": "m2",
    "loader": "stuff",
    "sampler": "order",
    "dataset": "rows",
    "DDP": "Wrapper",
    "DataLoader": "Feed",
    "DistributedSampler": "Order",
    "dist": "comm",
    "nn": "layers",
    "mp": "p",
    "train": "go",
    "save": "put",
    "evaluate": "look",
    "random_split": "part",
    "Net": "Thing",
    "batches": "source",
}


class Renamer(ast.NodeTransformer):
    """Rename variables, parameters, functions, classes and imports."""

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(RENAMED.get(node.id, node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(RENAMED.get(node.arg, node.arg), node.annotation)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = RENAMED.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = RENAMED.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> ast.alias:
        known = node.asname or node.name
        return ast.alias(node.name, RENAMED.get(known, node.asname))


@pytest.mark.parametrize("path", NOISE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_renaming_hides_no_fault(path: Path) -> None:
    """Variables, functions and imports under different names have the same reports."""
    tree = ast.parse(path.read_text())
    before = ast.unparse(tree)
    after = ast.unparse(ast.fix_missing_locations(Renamer().visit(tree)))
    reports = [[(each.line, each.code) for each in lint_text(text, "a.py")] for text in (before, after)]
    assert reports[0] == reports[1] != []
