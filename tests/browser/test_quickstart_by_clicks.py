# SPDX-License-Identifier: Apache-2.0
"""The quickstart as a person runs it: JupyterLab, one click per cell."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.browser.conftest import OpenNotebook
from tests.browser.lab import Lab

pytestmark = pytest.mark.browser
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.timeout(300)
def test_quickstart_runs_by_clicks_and_shows_labelled_lines_and_plots(lab: Lab, open_tab: OpenNotebook) -> None:
    """Every cell is clicked; ten labelled epochs and two plots are on the page, no traceback, in light and dark."""
    shutil.copy(EXAMPLES / "quickstart.ipynb", lab.root)
    tab = open_tab("quickstart.ipynb")
    shown = {index: tab.run(index, limit_s=120) for index in tab.code_cells()}
    assert tab.failed() == []

    launch = tab.find("results = ddpilot.launch(")
    epochs = re.findall(r"^\[ranks? [01,-]+\] epoch +(\d+): loss \d\.\d+", shown[launch], re.MULTILINE)
    assert set(map(int, epochs)) == set(range(1, 11)), shown[launch]
    (curve,) = tab.images(tab.find("plt.yscale"))
    (digits,) = tab.images(tab.find("axis.imshow"))
    assert min(curve) > 200
    assert min(digits) > 200

    tab.photograph("quickstart-light-labelled", launch)
    tab.photograph("quickstart-light")
    tab.theme("Dark")
    tab.photograph("quickstart-dark-labelled", launch)
    tab.photograph("quickstart-dark")
