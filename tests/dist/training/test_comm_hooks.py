# SPDX-License-Identifier: Apache-2.0
"""PowerSGD and hooks of the user, rank by rank against plain DDP with torch's own hook; resumed with its errors."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.small_models import loss_fn, make_data, make_model
from ddpilot.errors import LoopError, NonFiniteError
from ddpilot.training.loop import Loop
from ddpilot.training.models.comm_hooks import PowerSGD, forget_errors, hook_state
from tests.dist.training.bodies import launch

OPTIONS = PowerSGD(rank=2, start=3, min_compression_rate=1)
BUCKET_MB = 0.004
"""Several buckets, which DDP rebuilds after the first update."""
ACCUMULATE = 3


def make(**options: Any) -> tuple[Loop, Any]:
    """A loop and its batches: ragged ends, texts of different lengths, and for three ranks one without samples."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=5, accumulate=ACCUMULATE, progress=False, **options)
    return loop, loop.loader(make_data("gpt", 49), global_batch_size=12, shuffle=True)


def train(comm: Any, num_epochs: int = 3, **options: Any) -> dict[str, Any]:
    """The weights of this rank and what its hook keeps, with the loop."""
    loop, loader = make(**options)
    model = make_model("gpt")
    model, optimizer = loop.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), comm=comm, bucket_cap_mb=BUCKET_MB
    )
    for _ in loop.epochs(num_epochs):
        for x, y in loop.batches(loader):
            with loop.accumulate(model):
                loop.backward(loss_fn(model(x), y), count=int((y != -100).sum()))
            loop.clip_grad_norm_(model.parameters(), 0.5)
            loop.step(optimizer)
    return found(model)


def found(model: DistributedDataParallel) -> dict[str, Any]:
    """The weights of this rank and its errors, by bucket."""
    kept = hook_state(model)
    errors = {} if kept is None else {index: one.clone() for index, one in kept.state.error_dict.items()}
    return {"weights": [one.detach().clone() for one in model.parameters()], "errors": errors}


def run_one_by_one(state: Any, bucket: Any) -> Any:
    """torch's hook, which hangs on gloo if several buckets are under way."""
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


run_one_by_one.__annotations__.clear()  # DDP compares them with classes


def train_by_hand(num_epochs: int = 3) -> dict[str, Any]:
    """The same with DistributedDataParallel and torch's hook; the loop only reads the data."""
    loop, loader = make()
    model = DistributedDataParallel(make_model("gpt"), gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(None, 2, 3, min_compression_rate=1, orthogonalization_epsilon=1e-8)
    model.register_comm_hook(state, run_one_by_one)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    group: list[Any] = []
    for _ in loop.epochs(num_epochs):
        for x, y in loop.batches(loader):
            group.append((x, y, int((y != -100).sum())))
            if not loop.is_update:
                continue
            total = torch.tensor(float(sum(count for *_, count in group)))
            dist.all_reduce(total)
            for number, (tokens, targets, count) in enumerate(group):
                with nullcontext() if number + 1 == len(group) else model.no_sync():
                    output = model(tokens)
                    loss = loss_fn(output, targets) if count else output.sum() * 0
                    torch.autograd.backward(loss * (count * loop.world_size / total))
            group.clear()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": [one.detach().clone() for one in model.parameters()], "errors": dict(state.error_dict)}


def doubled(state: list[int], bucket: Any) -> Any:
    """A hook of the user, which counts."""
    state.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket).then(lambda future: future.value() * 2)  # type: ignore[arg-type]


doubled.__annotations__.clear()


def train_all(folder: str, steps: list[tuple[str, int]]) -> dict[str, Any]:
    """Everything at one number of ranks; `steps`: checkpoint directories and numbers of epochs."""
    result: dict[str, Any] = {"powersgd": train(OPTIONS), "by hand": train_by_hand()}
    calls: list[int] = []
    own = train((calls, doubled), 1)["weights"]
    plain = train(lambda state, bucket: doubled([], bucket), 1)["weights"]
    result["own"] = bool(calls) and all(map(torch.equal, own, plain))
    for name, num in steps:
        result[name] = train(OPTIONS, num, checkpoint_dir=f"{folder}/{name}")
    return result


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Weights, and errors bucket by bucket."""
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_powersgd_is_torchs_own_rank_by_rank_and_resumes_with_its_errors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At 1, 2 and 3 ranks; a run that was saved after two epochs goes on with them; at another size without."""
    said = []
    plans: dict[int, list[tuple[str, int]]] = {1: [], 2: [("two", 2), ("in3", 2), ("two", 3)], 3: [("in3", 3)]}
    for num, steps in plans.items():
        ranks = launch(num, train_all, str(tmp_path), steps)
        said.append(capfd.readouterr().err)
        for rank in ranks:
            assert rank["by hand"]["errors"]
            assert_close(rank["powersgd"], rank["by hand"])
            assert rank["own"]
            if num == 2:
                assert_close(rank["two"], rank["powersgd"])
    assert "own state" not in said[0] + said[1]
    assert "not resumed, as the checkpoint is of 2 ranks, this run has 3: model_comm begins again" in said[2]


def misuse() -> list[str]:
    """What is said of a loss that is not finite, the errors after it, and what each wrong use is told."""
    loop = Loop(progress=False)
    model = nn.Linear(6, 5)
    options = PowerSGD(start=2, min_compression_rate=1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=options)
    said = []
    loader = loop.loader(TensorDataset(torch.randn(16, 6)), global_batch_size=2)
    for epoch in range(2):
        try:
            for (x,) in loop.batches(loader):
                is_bad = epoch == 0 and loop.rank == 1 and loop.num_updates == 4
                loop.backward(model(x).pow(2).mean() * (float("nan") if is_bad else 1.0))
                loop.step(optimizer)
        except NonFiniteError as error:
            said.append(f"{error} {len(hook_state(model).state.error_dict)}")
    assert len(hook_state(model).state.error_dict) == 1
    forget_errors([model])
    assert all(bool(torch.isfinite(one).all()) for one in model.parameters())

    def annotated(state: Any, bucket: int) -> None:
        del state, bucket

    unknown: Any = "int8"
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.ones(()))
    for use in (
        lambda: loop.prepare(scalar, comm="powersgd"),
        lambda: loop.prepare(nn.Linear(1, 1), comm=annotated),
        lambda: loop.prepare(nn.Linear(1, 1), comm=unknown),
        lambda: PowerSGD(start=1),
        lambda: Loop(precision="fp16").prepare(nn.Linear(1, 1), comm="powersgd"),
    ):
        try:
            use()
        except LoopError as error:
            said.append(str(error))
    return [*said, str(loop.explain())]


def test_a_nan_leaves_no_error_behind_and_misuse_is_refused() -> None:
    """One rank's loss is NaN: all raise, and the next update begins without errors."""
    expected = (
        "the loss is nan",
        "parameter scale has no dimension",
        "DDP does not accept the hook 'annotated'",
        "`comm` is 'int8'. Use 'bf16', 'fp16', 'powersgd'",
        "`start` is 1. Pass a number of 2 or more.",
        '`comm="powersgd"` with `precision="fp16"`',
        "from update 2 on, gradients are sent as matrices of rank 1",
    )
    for said in launch(2, misuse):
        assert said[0].endswith(" 0")
        for text, part in zip(said, expected, strict=True):
            assert part in text
