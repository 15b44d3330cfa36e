# SPDX-License-Identifier: Apache-2.0
"""Samplers and loaders of a dataset."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpilot.lint.program import argument, has_unknown_arguments, is_constant
from ddpilot.lint.rule import Facts, Report, rule
from ddpilot.lint.scopes import Loop

_SAMPLER_AT = 3
_SHUFFLE_AT = 2
_DIVIDES = re.compile(r"rank|world|shard|replica|\bdist\b|distributed|split_|random|shuffle|worker_info", re.IGNORECASE)
"""Words of a stream that yields a part, or a random order, on each rank."""


@rule("DDP401")
def loader_without_sampler(facts: Facts) -> Iterator[Report]:
    """A DDP model trains on a DataLoader without a distributed sampler."""
    done: set[ast.AST] = set()
    for loop in facts.step_loops:
        if not facts.trains_ddp(loop):
            continue
        for call in facts.loaders_of(loop):
            if call not in done and not is_divided(facts, call):
                done.add(call)
                yield Report(call, "every rank reads the whole dataset: give the DataLoader a DistributedSampler")


def is_divided(facts: Facts, call: ast.Call) -> bool:
    """True if the loader, or its dataset, may give each rank its part."""
    program = facts.program
    given = {keyword.arg for keyword in call.keywords}
    if has_unknown_arguments(call) or len(call.args) > _SAMPLER_AT or "batch_sampler" in given:
        return True
    sampler = argument(call, _SAMPLER_AT, "sampler")
    if sampler is not None and not all(_is_plain_sampler(facts, each) for each in program.trace(sampler)):
        return True
    dataset = argument(call, 0, "dataset")
    if dataset is None:
        return True
    is_whole = sampler is None and _is_undivided_stream(facts, dataset)
    is_shuffled = is_constant(argument(call, _SHUFFLE_AT, "shuffle"), True)
    has_indices = sampler is not None or _has_indices(facts, dataset)
    if not is_shuffled and not is_whole and not has_indices:
        return True
    for each in program.trace(dataset):
        is_stream = isinstance(each, ast.Call) and program.name_of(each) == "IterableDataset"
        if isinstance(each, ast.ClassDef) or (is_stream and not is_whole):
            return True
        words = ast.unparse(each)
        if any(word in words for word in ("rank", "shard", "world_size", "num_replicas", "split_dataset_by_node")):
            return True
        made = [ast.unparse(one) for one in program.instances(each)]
        if any("rank" in text or ("IterableDataset" in text and not is_whole) for text in made):
            return True
    generator = argument(call, -1, "generator")
    return generator is not None and facts.flow.differs(generator)


def _has_indices(facts: Facts, dataset: ast.expr) -> bool:
    """True if the file shows that a dataset is not a stream, which may divide itself."""
    names = [name for name, _ in facts.program.made_by(dataset)]
    is_map = any(name.startswith(("torchvision.", "torch.utils.data.")) for name in names if name)
    classes = facts.program.instances(dataset)
    return is_map or any("__getitem__" in ast.unparse(each) for each in classes)


def _is_undivided_stream(facts: Facts, dataset: ast.expr) -> bool:
    """True if the file shows how an IterableDataset yields its samples, and no part of that knows of ranks."""
    program = facts.program
    classes = list(program.instances(dataset))
    bases = [each for one in classes for base in one.bases for each in program.trace(base)]
    texts = [ast.unparse(each) for each in [*classes, *bases] if isinstance(each, ast.ClassDef)]
    is_shown = program.is_made_by(dataset, "IterableDataset") and any("def __iter__" in text for text in texts)
    return is_shown and not any(_DIVIDES.search(text) for text in texts)


def _is_plain_sampler(facts: Facts, node: ast.AST) -> bool:
    """True for None, and for samplers of torch that know nothing of ranks."""
    if isinstance(node, (ast.Name, ast.Attribute, ast.IfExp)):
        return bool(list(facts.program.trace(node))[1:])
    if isinstance(node, ast.Call):
        return facts.program.name_of(node) in (
            "torch.utils.data.RandomSampler", "torch.utils.data.SequentialSampler",
            "torch.utils.data.WeightedRandomSampler", "torch.utils.data.SubsetRandomSampler",
        )  # fmt: skip
    return is_constant(node, None)


@rule("DDP413", is_fixable=True)
def sampler_and_shuffle(facts: Facts) -> Iterator[Report]:
    """A DataLoader gets a sampler and `shuffle=True`, which raises a ValueError."""
    for call in facts.program.calls_to("DataLoader"):
        sampler, shuffle = argument(call, _SAMPLER_AT, "sampler"), argument(call, _SHUFFLE_AT, "shuffle")
        made = [each for each in facts.program.trace(sampler) if isinstance(each, ast.Call)] if sampler else []
        if is_constant(shuffle, True) and made:
            yield Report(
                call,
                "a sampler and `shuffle=True` exclude each other: remove `shuffle`",
                ("remove-argument", "shuffle"),
            )


@rule("DDP402", is_fixable=True)
def missing_set_epoch(facts: Facts) -> Iterator[Report]:
    """A DistributedSampler is used for several epochs without `set_epoch`."""
    program = facts.program
    told = {each for call in program.calls_to(".set_epoch") for each in _receivers(facts, call)}
    if any(not list(_receivers(facts, call)) for call in program.calls_to(".set_epoch")):
        return
    for sampler in program.calls_to("DistributedSampler"):
        if sampler in told or is_constant(argument(sampler, 3, "shuffle"), False):
            continue
        loop = next(iter(_epoch_loops_over(facts, sampler)), None)
        if loop is None:
            continue
        name = _name_given(facts, sampler, loop)
        target = loop.target if isinstance(loop, ast.For) else None
        safe = name and isinstance(target, ast.Name) and not has_unknown_arguments(sampler)
        edit = ("insert-first", f"{name}.set_epoch({target.id})") if safe and isinstance(target, ast.Name) else None
        message = "every epoch has the same order: call `sampler.set_epoch(epoch)` at its beginning"
        if edit is not None and len(list(_epoch_loops_over(facts, sampler))) == 1:
            yield Report(sampler, message, ("insert-first", f"{loop.lineno}:{edit[1]}"))
        else:
            yield Report(sampler, message)


def _receivers(facts: Facts, call: ast.Call) -> Iterator[ast.Call]:
    """Yield the calls of DistributedSampler whose result gets this `set_epoch`, directly or as ``loader.sampler``."""
    assert isinstance(call.func, ast.Attribute)
    owner, program = call.func.value, facts.program
    if isinstance(owner, ast.Attribute) and owner.attr in ("sampler", "batch_sampler"):
        loaders = [made for name, made in program.made_by(owner.value) if name == "DataLoader"]
        samplers = [sampler for each in loaders if (sampler := argument(each, _SAMPLER_AT, "sampler")) is not None]
    else:
        samplers = [owner]
    for each in samplers:
        yield from (made for name, made in program.made_by(each) if name == "DistributedSampler")


def _epoch_loops_over(facts: Facts, sampler: ast.Call) -> Iterator[Loop]:
    """Yield the loops whose body trains over a loader with this sampler, once in each iteration."""
    program = facts.program
    seen: set[ast.AST] = set()
    for loop in facts.step_loops:
        for loader in facts.loaders_of(loop):
            given = argument(loader, _SAMPLER_AT, "sampler")
            if given is None or not any(made is sampler for _, made in program.made_by(given)):
                continue
            for outer in _loops_around(facts, loop):
                sets = any(
                    isinstance(c.func, ast.Attribute) and c.func.attr == "set_epoch"
                    for c in program.calls_inside(outer)
                )
                if outer not in seen and not sets and not any(each is loader for each in ast.walk(outer)):
                    seen.add(outer)
                    yield outer


def _loops_around(facts: Facts, node: ast.AST, depth: int = 3) -> Iterator[Loop]:
    loops = facts.program.loops_of(node)
    if loops:
        yield loops[0]
    elif depth:
        for site in facts.program.call_sites(facts.program.function_of(node)):
            yield from _loops_around(facts, site, depth - 1)


def _name_given(facts: Facts, sampler: ast.Call, loop: Loop) -> str:
    """Return the name of the sampler if it is a variable of the function of `loop`, and always the sampler; else ""."""
    statement = facts.program.parents[sampler]
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        is_beside = facts.program.parents[statement] is facts.program.parents[loop]
        return statement.targets[0].id if is_beside else ""
    return ""


@rule("DDP416")
def sampler_on_iterable(facts: Facts) -> Iterator[Report]:
    """A sampler for an IterableDataset, which has no indices to sample from."""
    program = facts.program
    for call in program.calls_to("DistributedSampler", "DataLoader"):
        dataset = argument(call, 0, "dataset")
        name = program.name_of(call)
        sampler = None if name == "DistributedSampler" else argument(call, _SAMPLER_AT, "sampler")
        has_sampler = name == "DistributedSampler" or (
            sampler is not None and program.is_made_by(sampler, "DistributedSampler")
        )
        if dataset is not None and has_sampler and program.is_made_by(dataset, "IterableDataset"):
            yield Report(call, "an IterableDataset takes no sampler: let each rank yield its own part")
