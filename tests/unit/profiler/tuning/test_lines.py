# SPDX-License-Identifier: Apache-2.0
"""Lines to paste, old and new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpilot.profiler.tuning.lines import write_changes
from ddpilot.profiler.tuning.options import Kind, Option
from ddpilot.user_files import CodeLine


def write(tmp_path: Path, text: str, line: int, *options: tuple[Kind, str, Any]) -> tuple[list[str], list[str]]:
    """The old and new lines for options that change the call at `line` of a script with `text`."""
    path = tmp_path / "train.py"
    path.write_text(text)
    lines = (CodeLine(str(path), line, "main", text.splitlines()[line - 1].strip()),)
    made = [Option(kind=kind, name=name, value=value, why="", lines=lines) for kind, name, value in options]
    (change,) = write_changes(made, "ddpilot run train.py")
    assert change.where == f"{path}:{line}"
    return list(change.old), list(change.new)


@pytest.mark.parametrize(
    ("old", "option", "new"),
    [
        ("ddp = DDP(model)", ("ddp", "bucket_cap_mb", 50), "ddp = DDP(model, bucket_cap_mb=50)"),
        (
            "m = nn.parallel.DistributedDataParallel(m, find_unused_parameters=True)",
            ("ddp", "find_unused_parameters", False),
            "m = nn.parallel.DistributedDataParallel(m, find_unused_parameters=False)",
        ),
        (
            'for x in DataLoader(d, 8, sampler=S(d), collate_fn=a["é"]): pass',
            ("loader", "num_workers", 4),
            'for x in DataLoader(d, 8, sampler=S(d), collate_fn=a["é"], num_workers=4): pass',
        ),
        ("batches = loop.loader(data)", ("loader", "num_workers", 2), "batches = loop.loader(data, num_workers=2)"),
        ("torch.set_num_threads(8)", ("threads", "OMP_NUM_THREADS", 1), "torch.set_num_threads(1)"),
        (
            "model = loop.prepare(model)",
            ("compression", "compression", "bf16"),
            "model = loop.prepare(model, comm='bf16')",
        ),
    ],
)
def test_a_call_is_changed(tmp_path: Path, old: str, option: tuple[Kind, str, Any], new: str) -> None:
    """An argument is added, or its value replaced."""
    assert write(tmp_path, f"import torch\n{old}\n", 2, option) == ([old], [new])


def test_a_call_on_several_lines_keeps_its_form(tmp_path: Path) -> None:
    """What is added has a line of its own."""
    text = "loader = DataLoader(\n    data,\n    num_workers=0,\n)\n"
    old, new = write(tmp_path, text, 1, ("loader", "num_workers", 4), ("loader", "pin_memory", True))
    assert (old, new) == (["num_workers=0,"], ["num_workers=4,", "pin_memory=True,"])


def test_the_hook_of_compression_is_registered_after_the_wrapper(tmp_path: Path) -> None:
    """Under the name of the model."""
    old, new = write(tmp_path, "if True:\n    ddp = DDP(net)\n", 2, ("compression", "compression", "fp16"))
    assert old == []
    assert new == [
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
        "ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)",
    ]


@pytest.mark.parametrize("call", ["trainer.fit(model)", "DDP(model, **options)", "DDP(a), DDP(b)"])
def test_what_cannot_be_edited_is_advised(tmp_path: Path, call: str) -> None:
    """Other calls, keyword arguments that are not known, several calls in a line."""
    assert write(tmp_path, f"{call}\n", 1, ("ddp", "static_graph", True)) == (
        [call],
        ["# give DistributedDataParallel static_graph=True"],
    )


def test_a_variable_goes_to_the_shell() -> None:
    """In front of the command."""
    option = Option(kind="threads", name="OMP_NUM_THREADS", value=1, why="")
    (change,) = write_changes([option], "ddpilot run -n 2 train.py")
    assert str(change) == "in the shell\n+ OMP_NUM_THREADS=1 ddpilot run -n 2 train.py"
