# SPDX-License-Identifier: Apache-2.0
"""How the public names look to a type checker: checked by `make check`, never run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import assert_type

import ddpilot
from ddpilot.callbacks import EarlyStopping, Timers


def train(epochs: int, lr: float = 0.1) -> dict[str, float]:
    """A user's function."""
    return {"loss": epochs * lr}


def check_launch() -> None:
    """`launch` takes any function with its arguments and gives a sequence by rank."""
    results = ddpilot.launch(train, 3, lr=0.1, nproc_per_node=2)
    assert_type(results, ddpilot.RankResults)
    as_sequence: Sequence[Any] = results
    iterator: Iterator[Any] = iter(as_sequence)
    assert_type(len(results), int)
    assert_type(results[0:1], list[Any])
    next(iterator)
    ddpilot.launch(train, 3, nproc_per_node="cpu")
    ddpilot.launch(train, 3, nproc_per_node=2.0)  # type: ignore[arg-type]


def check_version() -> None:
    """The version is text."""
    assert_type(ddpilot.__version__, str)


def check_launcher() -> None:
    """Every option of a launcher is a keyword with a type."""
    launcher = ddpilot.Launcher(nproc_per_node=2, backend="gloo", env={"A": "1"}, timeout_s=60.0, preload=("scipy",))
    assert_type(launcher.run(train, 3), ddpilot.RankResults)
    ddpilot.Launcher(output="silent")
    ddpilot.Launcher(output="loud")  # type: ignore[arg-type]
    launcher.timeout_s = 1.0  # type: ignore[misc]


def check_group() -> None:
    """A group is a context manager that knows who and where this rank is."""
    with ddpilot.init_group(backend="gloo", timeout_s=30.0, seed=0) as group:
        assert_type(group.rank, int)
        assert_type(group.world_size, int)
        assert_type(group.local_rank, int)
    group.leave()


def check_session() -> None:
    """A session is a context manager; its verbs have types."""
    with ddpilot.Session(2, apps=("fastai",), seed=0, respawn=True) as session:
        assert_type(session.execute("1 + 1", ranks=[0], quiet=True), ddpilot.CellResult)
        assert_type(session.run(train, 3), ddpilot.RankResults)
        assert_type(session.stacks(), dict[int, str])
        assert_type(session.pids(), dict[int, int])
        assert_type(session.interrupt(), bool)
        session.push({"name": 1}, ranks=[1])
        session.restart(1)
        for status in session.status():
            assert_type(status.rank, int)
    ddpilot.Session(2, output="labelled", nonsense=1)  # type: ignore[call-arg]


class Stop(ddpilot.Callback):
    """A user's callback."""

    ranks = "all"

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        """What it is given has types."""
        assert_type(run.epoch, int)
        assert_type(run.model, torch.nn.Module)
        assert_type(run.loss, torch.Tensor | None)
        run.stop(everywhere=True)


def check_trainer(data: torch.utils.data.Dataset[torch.Tensor]) -> None:
    """What belongs to the constructor and what to `fit` is told apart."""
    model = torch.nn.Linear(1, 1)
    trainer = ddpilot.Trainer(
        model,
        torch.nn.functional.mse_loss,
        lambda p: torch.optim.SGD(p, lr=0.1),
        ema=0.9,
        callbacks=[Stop(), EarlyStopping(), Timers()],
    )
    assert_type(trainer.fit(data, epochs=2, global_batch_size=8, nproc_per_node=2), ddpilot.History)
    assert_type(trainer.evaluate(data), dict[str, Any])
    assert_type(trainer.history.epochs, list[dict[str, Any]])
    trainer.fit(data, ddp=ddpilot.DDPOptions(comm="bf16"), checkpoints=ddpilot.CheckpointOptions(keep=1))
    trainer.fit(data, loader=ddpilot.LoaderOptions(global_batch_size=8, batch_split=[2, 1]))
    trainer.fit(ddpilot.JsonLinesShards("*.jsonl", transform=str), loader=ddpilot.LoaderOptions(num_lanes=8))
    trainer.fit(data, precision="bf16")  # type: ignore[call-arg]
    trainer.call("sample", 3, ranks="some")  # type: ignore[arg-type]


def check_ensure_on_device() -> None:
    """What it returns is of the type that it was given."""
    assert_type(ddpilot.ensure_on_device(torch.nn.Linear(1, 1), "cpu"), torch.nn.Linear)
    ddpilot.ensure_on_device(torch.ones(1), "cpu")  # type: ignore[type-var]


def check_parts(model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: ddpilot.Group) -> None:
    """What a loop is made of can be used alone."""
    outcome = ddpilot.joint_try(lambda: 1, group)
    assert_type(outcome, ddpilot.JointTry)
    assert_type(outcome.ran_out, tuple[int, ...])
    assert_type(list(ddpilot.read_predictions("folder")), list[Any])
    with ddpilot.CheckpointDir("folder", keep=2) as directory:
        assert_type(directory.latest(), ddpilot.Checkpoint | None)
        ddpilot.CollectiveCheckpoints(group, directory).save(ddpilot.RunProgress(step=1), weights={"model": {}})
    assert_type(ddpilot.merge_shards("folder", "model.safetensors"), Path)
    ddpilot.load_into(model, {"weight": torch.ones(1)}, source="here")
    state = ddpilot.full_state(optimizer)
    assert_type(state, dict[str, Any])
    ddpilot.load_full_state(optimizer, state)


def check_diagnosis() -> None:
    """A ring and a journal are read into values."""
    assert_type(ddpilot.read_ring("rank0.ring"), ddpilot.RankLog)
    assert_type(ddpilot.read_journal("rank0.journal"), ddpilot.Journal)


def check_doctor() -> None:
    """A diagnosis has findings and an exit status."""
    found = ddpilot.doctor(nproc_per_node=2, checkpoint_dir="runs", live=False)
    ddpilot.doctor(nodes=True, script="train.py")
    assert_type(found, ddpilot.Diagnosis)
    assert_type(found.exit_status, int)
    assert_type(found.findings[0], ddpilot.Finding)


def check_verify() -> None:
    """A verification has a verdict, findings and an exit status; a program is a function or a path."""
    found = ddpilot.verify("train.py:train", nproc_per_node=2, num_updates=3)
    assert_type(found, ddpilot.Verification)
    assert_type(found.is_equal, bool)
    assert_type(found.exit_status, int)
    assert_type(ddpilot.verify(check_app), ddpilot.Verification)


def check_program_doctor() -> None:
    """The diagnosis of a program has the rung that failed, findings and an exit status."""
    found = ddpilot.check_program("train.py", "--epochs", 1, nproc_per_node=2, num_updates=3)
    assert_type(found, ddpilot.ProgramDiagnosis)
    assert_type(found.exit_status, int)
    assert_type(found.findings[0], ddpilot.Finding)


def check_app() -> None:
    """An app is a value; its functions get the state of a rank."""

    def prepare(context: ddpilot.AppContext) -> None:
        assert_type(context.rank, int)

    ddpilot.App(name="mylib", libraries=("mylib",), initializer=prepare)
    ddpilot.run_script(ddpilot.RunOptions(target="train.py", nproc_per_node=2))


def check_errors() -> None:
    """Errors carry what was done and found, and are caught by the built-in types they stand for."""
    try:
        ddpilot.launch(train, 3)
    except ddpilot.RankError as error:
        assert_type(error.rank, int | None)
        assert_type(error.exitcode, int)
        assert_type(error.last_lines, tuple[str, ...])
    except ddpilot.LaunchTimeoutError as error:
        is_builtin: TimeoutError = error
        raise is_builtin from None
    except ddpilot.ShipError as error:
        assert_type(error.path, str)
