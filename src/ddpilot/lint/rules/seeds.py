# SPDX-License-Identifier: Apache-2.0
"""Random numbers: equal on all ranks where they should differ, and different where they should be equal."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpilot.lint.program import argument, has_unknown_arguments, is_constant
from ddpilot.lint.rule import Facts, Report, rule

_SEEDERS = ("torch.manual_seed", "torch.random.manual_seed", "lightning.seed_everything", "accelerate.utils.set_seed")
_SEEDS_ALL = re.compile(r"seed_everything|seed_all|set_seed|init_seeds|fix_seed|set_random_seed")
_SEEDS: dict[str, tuple[str, ...]] = {
    "torch": ("torch.manual_seed", "torch.random.manual_seed", "torch.set_rng_state"),
    "numpy": ("numpy.random.seed", "numpy.random.set_state"),
    "random": ("random.seed", "random.setstate"),
    "sklearn": ("numpy.random.seed", "numpy.random.set_state"),
}
"""What seeds the generator that a library draws from."""
_DRAWS = frozenset({"randn", "rand", "randint", "randn_like", "rand_like", "randint_like", "normal", "bernoulli"})
_SPLITS = ("torch.utils.data.random_split", "torch.utils.data.dataset.random_split")
_ORDERS = {
    "torch.randperm": "torch",
    "numpy.random.permutation": "numpy",
    "numpy.random.shuffle": "numpy",
    "random.shuffle": "random",
    "random.sample": "random",
    "sklearn.model_selection.train_test_split": "sklearn",
}
"""Functions that put samples into a random order, and whose generator they use."""
_WORKER_SEEDERS = ("numpy.random.seed", "random.seed", "torch.manual_seed")


@rule("DDP415")
def unseeded_split(facts: Facts) -> Iterator[Report]:
    """A random split without a seed, which differs between ranks."""
    text = facts.program.text
    if not facts.wraps or _SEEDS_ALL.search(text) or "manual_seed" in text:
        return
    for call in facts.program.calls_to(*_SPLITS):
        if argument(call, 2, "generator") is None and not has_unknown_arguments(call):
            yield Report(
                call, "each rank splits the dataset differently: pass `generator=torch.Generator().manual_seed(0)`"
            )


@rule("DDP415")
def unseeded_order(facts: Facts) -> Iterator[Report]:
    """Samples or files are put into a random order without a seed before they are divided between ranks."""
    program = facts.program
    if not facts.wraps or _SEEDS_ALL.search(program.text):
        return
    in_loops = {call for loop in facts.step_loops for call in program.calls_inside(loop)}
    for call in program.calls_to(*_ORDERS):
        is_seeded = bool(program.calls_to(*_SEEDS[_ORDERS[program.name_of(call)]]))
        given = argument(call, -1, "generator") or argument(call, -1, "random_state")
        if is_seeded or given is not None or has_unknown_arguments(call) or call in in_loops:
            continue
        is_alone = facts.flow.runs_on_some_ranks(call)
        if not is_alone and not _is_of_each_sample(facts, call) and _orders_samples(facts, call):
            yield Report(call, "each rank draws a different order here: pass a seed that is the same on all ranks")


def _orders_samples(facts: Facts, call: ast.Call) -> bool:
    """True for a permutation of ``len(...)``, and for what shuffles a list or splits a table."""
    name = facts.program.name_of(call)
    if name not in ("torch.randperm", "numpy.random.permutation"):
        return True
    size = call.args[0] if call.args else None
    traced = facts.program.trace(size) if size is not None else []
    return any(isinstance(each, ast.Call) and getattr(each.func, "id", "") == "len" for each in traced)


def _is_of_each_sample(facts: Facts, call: ast.Call) -> bool:
    """True in a dataset, a sampler, a model or a loop: what draws there need not agree with the other ranks."""
    owner = facts.program.class_of(call)
    names = {getattr(each, "name", "") for each in owner.body} if owner is not None else set()
    return bool(names & {"__getitem__", "__iter__", "forward", "__call__"}) or bool(facts.program.loops_of(call))


@rule("DDP407")
def same_noise(facts: Facts) -> Iterator[Report]:
    """All ranks have the same seed, and each training step draws numbers from it."""
    program = facts.program
    calls = program.calls_to(*_SEEDERS)
    seeds = [(call, seed) for call in calls if (seed := argument(call, 0, "seed")) is not None]
    if not seeds or any(facts.flow.differs(each) for _, seed in seeds for each in program.trace(seed)):
        return
    if not all(_is_fixed(facts, seed) for _, seed in seeds):
        return
    for loop in facts.step_loops:
        draws = [call for call in program.calls_inside(loop) if _draws(facts, call)]
        draws = [call for call in draws if not _is_of_each_sample_of_model(facts, call)]
        draws.sort(key=lambda each: (each.lineno, each.col_offset))
        if draws and facts.trains_ddp(loop) and not any(facts.flow.rank_guard(each) for each in draws[:1]):
            line = seeds[-1][0].lineno
            yield Report(draws[0], f"all ranks draw the same numbers here: the seed of line {line} is the same on each")
            return


def _is_of_each_sample_of_model(facts: Facts, call: ast.Call) -> bool:
    owner = facts.program.class_of(call)
    return owner is not None and any(getattr(each, "name", "") == "forward" for each in owner.body)


def _draws(facts: Facts, call: ast.Call) -> bool:
    module, _, name = facts.program.name_of(call).rpartition(".")
    return module == "torch" and name in _DRAWS and argument(call, -1, "generator") is None


def _is_fixed(facts: Facts, seed: ast.expr) -> bool:
    """True if a seed is a number of the program, or an option of it."""
    leaves = list(facts.program.trace(seed))
    last = leaves[-1] if leaves else None
    return isinstance(last, ast.Constant) or (isinstance(last, ast.Attribute) and "seed" in last.attr)


@rule("DDP407")
def same_workers(facts: Facts) -> Iterator[Report]:
    """A `worker_init_fn` seeds the workers of all ranks alike, or of all epochs."""
    program = facts.program
    done: set[ast.AST] = set()
    for loader in program.calls_to("DataLoader") if facts.wraps else ():
        given = argument(loader, -1, "worker_init_fn")
        for function in program.trace(given) if given is not None else ():
            if not isinstance(function, (ast.FunctionDef, ast.Lambda)) or function in done:
                continue
            done.add(function)
            body = [function.body] if isinstance(function, ast.Lambda) else function.body
            calls = [each for part in body for each in ast.walk(part) if isinstance(each, ast.Call)]
            own = {each.arg for each in function.args.args}
            for call in calls:
                is_seed = program.name_of(call) in _WORKER_SEEDERS and len(call.args) == 1
                if is_seed and _is_same_on_all_ranks(call.args[0], own):
                    yield Report(call, "workers of all ranks draw the same numbers: seed by `torch.initial_seed()`")


def _is_same_on_all_ranks(node: ast.expr, own: set[str]) -> bool:
    """True for a number, the worker's number, and sums of these."""
    parts = [each for each in ast.walk(node) if not isinstance(each, (ast.operator, ast.expr_context))]
    return all(
        isinstance(each, (ast.Constant, ast.BinOp)) or (isinstance(each, ast.Name) and each.id in own) for each in parts
    ) and not is_constant(node, None)
