# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, if it is installed: an offline run, read back from its file."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpilot.errors import LoopError
from ddpilot.trainer.callbacks.logs import WandbLog
from tests.unit.trainer.callbacks.fits import fit, make_trainer


def test_wandb_log_names_a_missing_package_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb is no dependency."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    trainer = make_trainer(WandbLog())
    with pytest.raises(LoopError, match=r"logging to Weights & Biases: .*pip install wandb"):
        fit(trainer)
    assert not trainer.history.epochs


FITS = """
import json, struct, sys
from pathlib import Path
from ddpilot.trainer.callbacks.logs import WandbLog
from tests.unit.trainer.callbacks.fits import fit, make_trainer

log = WandbLog(every=2, project="test", mode="offline", dir=sys.argv[1])
trainer = fit(make_trainer(log))
first = log.run_id
fit(trainer)

from wandb.proto.wandb_internal_pb2 import Record

rows = []
for path in sorted(Path(sys.argv[1]).rglob("*.wandb")):
    data, place = path.read_bytes(), 7
    while place + 7 <= len(data):  # LevelDB's log: checksum, length and kind before each record, here of one block
        _, length, kind = struct.unpack_from("<IHB", data, place)
        assert kind == 1, kind
        record = Record.FromString(data[place + 7 : place + 7 + length])
        place += 7 + length
        items = record.history.item
        rows += [{".".join(one.nested_key) or one.key: json.loads(one.value_json) for one in items}] if items else []
said = {"ids": [first, log.run_id], "rows": rows, "losses": [row["loss"] for row in trainer.history.epochs]}
print(json.dumps(said))
"""


def test_wandb_log_continues_its_run(tmp_path: Path) -> None:
    """Two fits, one run's id; updates and epochs by the number of the update.

    In a process of its own: W&B leaves threads and files behind.
    """
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed: nothing needs it")
    environ = {**os.environ, "WANDB_SILENT": "true", "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FITS, str(tmp_path)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said["ids"][0] == said["ids"][1] is not None
    assert [row["_step"] for row in said["rows"]] == [2, 3, 4, 6]
    assert [row["loss"] for row in said["rows"] if "loss" in row] == said["losses"]
    assert all("batch_loss" in row for row in said["rows"] if row["_step"] != 3)
