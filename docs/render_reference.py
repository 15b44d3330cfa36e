# SPDX-License-Identifier: Apache-2.0
"""Write the pages of docs/reference from the docstrings of the public names: `python docs/render_reference.py`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import ddpilot
import ddpilot.callbacks
import ddpilot.watch

TARGET = Path(__file__).with_name("reference")
MARK = """<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Made by docs/render_reference.py from the docstrings. Edit those, then run it. -->
"""
HEAD = """# Reference

Every public name of `ddpilot` and of its public module `ddpilot.callbacks`, by task. *Collective* means that every rank
of the group has to make the call.
"""


class Task(NamedTuple):
    """A page of the reference."""

    page: str
    """Its file, without the ending."""
    title: str
    guide: str
    """Links to the pages that explain the task."""
    names: tuple[str, ...]
    """In the order of the page; dotted for the names of a public module."""


CALLBACKS = (
    *("CsvLog", "JsonLinesLog", "TensorBoardLog", "WandbLog", "MLflowLog", "Pictures", "BestWeights", "EarlyStopping"),
    *("LRMonitor", "Norms", "Timers", "Profile", "GarbageCollection", "Schedule"),
)
TASKS = (
    Task(
        "launch",
        "Launch ranks",
        "[Quickstart](../tutorials/function.md), [`ddpilot run`](../how_to/run.md)",
        ("launch", "Launcher", "RankResults", "run_script", "RunOptions"),
    ),
    Task("slurm", "Run on a Slurm cluster", "[Slurm](../how_to/slurm.md)", ("SlurmLauncher", "SlurmJob", "JobOptions")),
    Task(
        "session",
        "Keep ranks in a session",
        "[Magics](../how_to/jupyter.md)",
        ("Session", "SessionOptions", "CellResult"),
    ),
    Task(
        "group",
        "Process group and rank",
        "[For library authors](../how_to/library_authors.md)",
        ("init_group", "Group", "topology", "Topology", "on_ranks", "rank_zero_only", "FakeGroup"),
    ),
    Task(
        "data",
        "Data and batch size",
        "[Data](../how_to/data.md), [before training](../how_to/callbacks.md#before-training)",
        (
            *("LoaderOptions", "ShardedDataset", "JsonLinesShards", "ParquetShards", "WebDatasetShards"),
            *("find_batch_size", "BatchSizeSearch", "scale_lr"),
            *("find_learning_rate", "LearningRateSearch"),
        ),
    ),
    Task(
        "loop",
        "Write a training loop",
        "[A training loop of your own](../how_to/loop.md)",
        (
            *("Loop", "DDPOptions", "ParameterSharding", "PowerSGD", "Averaging", "unwrap", "read_predictions"),
            *("joint_try", "JointTry"),
            *("CsvLogger", "JsonLinesLogger", "TensorBoardLogger", "WandbLogger", "MLflowLogger", "Logger", "LogStart"),
        ),
    ),
    Task(
        "trainer",
        "Train with a Trainer",
        "[Trainer](../how_to/trainer.md), [callbacks](../how_to/callbacks.md)",
        ("Trainer", "History", "Run", "Callback", *(f"callbacks.{name}" for name in CALLBACKS)),
    ),
    Task(
        "models",
        "Models and optimizers",
        "[Before training](../how_to/callbacks.md#before-training), "
        "[models that exist already](../how_to/library_authors.md)",
        (
            *("count_parameters", "ParameterCount", "freeze", "unfreeze", "ensure_on_device"),
            *("full_state", "load_full_state"),
        ),
    ),
    Task(
        "checkpoints",
        "Save and load checkpoints",
        "[Checkpoints](../how_to/checkpoints.md)",
        (
            *(
                "CheckpointOptions",
                "load_weights",
                "load_into",
                "merge_shards",
                "CheckpointDir",
                "CollectiveCheckpoints",
            ),
            *("Checkpoint", "RunProgress"),
        ),
    ),
    Task(
        "diagnose",
        "Diagnose",
        "[Doctor](../how_to/doctor.md), [verify](../how_to/verify.md), [hangs](../how_to/hang.md), "
        "[silent errors](../how_to/silent_errors.md), [findings](../errors/index.md), "
        "[the flight ring](../internals/flight-ring.md)",
        (
            "doctor",
            "Diagnosis",
            "check_program",
            "ProgramDiagnosis",
            "verify",
            "Verification",
            "watch.enable",
            "Finding",
            "read_ring",
            "RankLog",
            "read_journal",
            "Journal",
        ),
    ),
    Task(
        "integrations",
        "Integrate a library",
        "[Apps](../how_to/apps.md), [Lightning](../how_to/lightning.md)",
        ("App", "AppContext"),
    ),
)
RETURNED = ("Diagnosis", "Group", "RankResults", "Run", "SlurmJob", "Verification")
"""Classes whose objects ddpilot creates: their arguments are not shown."""


def render_reference() -> dict[Path, str]:
    """Return the text of each page: an index, a page for each of `TASKS`, and the exceptions."""
    errors = [name for name in ddpilot.__all__ if name[0] != "_" and is_error(getattr(ddpilot, name))]
    tasks = [*TASKS, Task("errors", "Exceptions", "", tuple(errors))]
    rows = [_render_row(task) for task in tasks]
    pages = {TARGET / "index.md": "\n".join([MARK + HEAD, *rows, ""])}
    return pages | {TARGET / f"{task.page}.md": _render_task(task) for task in tasks}


def _render_row(task: Task) -> str:
    names = ", ".join(f"[`{name}`]({task.page}.md#{re.sub(r'[^a-z0-9_ -]', '', name.lower())})" for name in task.names)
    return f"- [{task.title}]({task.page}.md): {names}"


def _render_task(task: Task) -> str:
    parts = [f"{MARK}# {task.title}\n"]
    parts += [f"See {task.guide}.\n"] if task.guide else []
    return "\n".join([*parts, *(_render_name(name, attrgetter(name)(ddpilot)) for name in task.names)])


def is_error(value: object) -> bool:
    """True if `value` is an exception class."""
    return inspect.isclass(value) and issubclass(value, BaseException)


def public_members(cls: type) -> Iterator[tuple[str, object]]:
    """Methods and properties that ddpilot's own classes define for `cls`, by name; fields are not among them."""
    for name in dir(cls):
        home = next((base for base in cls.__mro__ if name in vars(base)), object)
        value = vars(home).get(name)
        is_member = isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
        if is_member and not name.startswith("_") and home.__module__.startswith("ddpilot"):
            yield name, value


def field_docs(cls: type) -> dict[str, str]:
    """Return the string under each field of a dataclass or NamedTuple, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("ddpilot") and (dataclasses.is_dataclass(base) or hasattr(base, "_fields")):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, text in zip(body.body, body.body[1:], strict=False):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                    found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))  # type: ignore[attr-defined]
    return found


def _render_name(name: str, value: object) -> str:
    lines = [f"## {name}\n"]
    is_made_by_users = name not in RETURNED and not is_error(value) and not _fields(value)
    if inspect.isfunction(value) or (is_made_by_users and inspect.signature(value).parameters):  # type: ignore[arg-type]
        lines.append(f"```python\n{_signature(name.rpartition('.')[2], value)}\n```\n")
    lines.append(f"{inspect.getdoc(value) or ''}\n")
    if inspect.isclass(value):
        docs = field_docs(value)
        lines += [_render_field(*field, docs) for field in _fields(value)]
        lines += [""] if _fields(value) else []
        if not is_error(value):
            inherited = () if value is ddpilot.Callback else dir(ddpilot.Callback)
            members = public_members(value)
            lines += [_render_member(name, member, what) for member, what in members if member not in inherited]
    return "\n".join(lines)


def _fields(value: object) -> list[tuple[str, str, str]]:
    """Return name, type and default (" = ...") of each field of a dataclass or NamedTuple."""
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        return [(field.name, str(field.type), _default(field)) for field in dataclasses.fields(value) if field.init]
    kinds = getattr(value, "__annotations__", {})
    return [(name, kinds[name].__forward_arg__, "") for name in getattr(value, "_fields", ())]


def _default(field: dataclasses.Field[object]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f" = {field.default_factory()!r}"
    return "" if field.default is dataclasses.MISSING else f" = {field.default!r}"


def _render_field(name: str, kind: str, default: str, docs: dict[str, str]) -> str:
    return f"- `{name}: {kind}{default}` {' '.join(docs.get(name, '').split())}".rstrip()


def _render_member(owner: str, name: str, value: object) -> str:
    function = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
    assert inspect.isfunction(function)
    shown = f"{owner}.{name}" if isinstance(value, property) else _signature(f"{owner}.{name}", function)
    return f"`{shown}`\n: {_indent(inspect.getdoc(function) or '')}\n"


def _indent(doc: str) -> str:
    """Return a docstring as the body of a definition: paragraphs and list items remain, each in one line."""
    return textwrap.indent(re.sub(r"(?<!\n)\n(?!\n|- ) *", " ", doc), "  ").lstrip()


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    if isinstance(function, type):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    text = str(signature).replace("(self, /, ", "(").replace("(self, ", "(").replace("(self)", "()")
    text = re.sub(r"<function (\w+) at \w+>", r"\1", text)
    return name + re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are text, shown without their quotes


if __name__ == "__main__":
    for path, text in render_reference().items():
        path.write_text(text)
