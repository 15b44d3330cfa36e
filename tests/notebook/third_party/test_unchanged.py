# SPDX-License-Identifier: Apache-2.0
"""Notebooks of other libraries, as they would be written for torchrun, on two ranks and on one: the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.notebook.running import code_cells, run_cells
from tests.soak import often

NOTEBOOKS = sorted(Path(__file__).parent.glob("*.ipynb"))
TELL = """
import json, pathlib
pathlib.Path(f"losses{rank}of{world_size}.json").write_text(json.dumps(losses))
"""


@pytest.mark.timeout(240)
# transformers trains by way of accelerate. Of Lightning: tests/dist/integrations; of plain DDP: tests/dist/session.
@often("accelerate")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[notebook.stem for notebook in NOTEBOOKS])
def test_losses_on_two_ranks_are_those_of_one_process(notebook: Path, tmp_path: Path) -> None:
    """The library sees a torchrun job, makes or adopts the group by itself, and trains with the same global batch."""
    cells = code_cells(notebook)
    magics = ["%load_ext ddpilot\n%ddp start -n 2\n%ddp auto on", "%ddp stop\n%ddp start -n 1\n%ddp auto on"]
    run_cells([magics[0], *cells, TELL, magics[1], *cells, TELL], tmp_path)
    one, first, second = (
        json.loads((tmp_path / f"losses{name}.json").read_text()) for name in ("0of1", "0of2", "1of2")
    )
    assert len(one) >= 8
    assert one[-1] < one[0]
    assert first == pytest.approx(one, rel=1e-4)
    assert second == pytest.approx(one, rel=1e-4)
