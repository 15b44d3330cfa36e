# SPDX-License-Identifier: Apache-2.0
"""examples/digits_trainer.py learns, and says the same where it starts ranks and where it is started on them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import digits_trainer

SCRIPT = Path(digits_trainer.__file__)


@pytest.mark.timeout(120)
def test_digits_are_learnt_alike_from_a_script_and_under_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    """More than 93 of 100 after two epochs on two ranks; as many, to one image, on a rank of torchrun's."""
    accuracy = digits_trainer.main(epochs=2, nproc_per_node=2)
    assert accuracy > 0.93
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"test accuracy {accuracy:.1%}; the first ten digits are [5, ")
    argv = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node=1", SCRIPT, "--epochs=2"]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^test accuracy ([\d.]+)%", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert float(found[1]) / 100 == pytest.approx(accuracy, abs=0.004)
