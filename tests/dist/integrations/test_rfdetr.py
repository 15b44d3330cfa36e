# SPDX-License-Identifier: Apache-2.0
"""RF-DETR as it is, through our mapping: its own "ddp_notebook" object, its test phase, predict and export.

RF-DETR is not among the development dependencies (with its own it is several hundred megabytes): pip install
"rfdetr[train]" to run this. What needs a GPU is in tests/gpu.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launching.scripts import run_script

SHIMS = Path(__file__).parents[2] / "notebook" / "shims"
needs_rfdetr = pytest.mark.skipif(find_spec("rfdetr") is None, reason="rfdetr is not installed")

SCRIPT = """
import sys
sys.ps1 = ">>> "  # a notebook, as far as Lightning can tell
import json, os
import numpy as np
from PIL import Image
import ddpilot.integrations.lightning
ddpilot.integrations.lightning.use_for_notebooks()
import torch
from rfdetr import RFDETRNano

random = np.random.default_rng(0)
for split in ("train", "valid", "test"):  # a white box on noise
    os.makedirs(f"coco/{split}")
    images, boxes = [], []
    for index in range(6):
        picture = random.integers(0, 80, (64, 64, 3), dtype=np.uint8)
        x, y = (int(number) for number in random.integers(4, 30, 2))
        picture[y : y + 24, x : x + 24] = 255
        Image.fromarray(picture).save(f"coco/{split}/{index}.png")
        images.append({"id": index, "file_name": f"{index}.png", "width": 64, "height": 64})
        boxes.append({"id": index + 1, "image_id": index, "category_id": 0, "bbox": [x, y, 24, 24], "area": 576,
                      "iscrowd": 0})
    with open(f"coco/{split}/_annotations.coco.json", "w") as file:
        categories = [{"id": 0, "name": "box", "supercategory": "thing"}]
        json.dump({"images": images, "annotations": boxes, "categories": categories}, file)

before_use = torch.cuda.is_initialized()
model = RFDETRNano(pretrain_weights=None, num_classes=1, resolution=128, DEVICE)
before_train = torch.cuda.is_initialized()
square = torch.randn(300, 300, requires_grad=True)
(square @ square).sum().backward()
before = {name: value.cpu().clone() for name, value in model.model.model.state_dict().items()}
model.train(dataset_dir="coco", output_dir="out", epochs=1, batch_size=1, grad_accum_steps=1, num_workers=1,
            strategy="STRATEGY", use_ema=True, run_test=True, tensorboard=False, progress_bar=None, TRAIN)
after = model.model.model.state_dict()
changed = sum(not torch.equal(value.cpu(), before[name]) for name, value in after.items() if name in before)
found = model.predict(picture, threshold=0.0)
exported = False
if EXPORT:
    model.export(output_dir="exported")
    exported = bool(os.listdir("exported"))
print("told " + json.dumps({"changed": changed, "of": len(before), "found": type(found).__name__, "exported": exported,
    "files": sorted(os.listdir("out")), "cuda": [before_use, before_train]}))
"""


def run_rfdetr(folder: Path, *, strategy: str, device: str, train: str) -> tuple[dict[str, Any], str]:
    """The result and the output of a script that trains, predicts and exports."""
    export = str(find_spec("onnx") is not None)
    source = SCRIPT.replace("STRATEGY", strategy).replace("DEVICE", device).replace("TRAIN", train)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(SHIMS), os.environ.get("PYTHONPATH"))))}
    outcome = run_script(source.replace("EXPORT", export), folder, env=env, limit_s=280)
    last = next(line for line in reversed(outcome.out.splitlines()) if line.startswith("told "))
    return json.loads(last.removeprefix("told ")), outcome.out + outcome.err


@needs_rfdetr
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp_notebook", "ddp_spawn"])
def test_rfdetr_trains_tests_predicts_and_exports_on_two_ranks(strategy: str, tmp_path: Path) -> None:
    """On the CPU. Its test phase runs, which its own spawn strategy skips, and CUDA is left alone until then."""
    train = 'devices=2, accelerator="cpu"'
    told, printed = run_rfdetr(tmp_path, strategy=strategy, device='device="cpu"', train=train)
    assert "MEMBER: 2/2" in printed
    assert "Skipping trainer.test()" not in printed
    assert told["changed"] > told["of"] // 2
    assert told["found"] == "Detections"
    assert told["exported"]
    assert "checkpoint_best_ema.pth" in told["files"]
    assert told["cuda"] == [False, False]
