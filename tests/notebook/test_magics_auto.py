# SPDX-License-Identifier: Apache-2.0
"""`%ddp auto on` in a real Jupyter kernel: plain cells run on the ranks, next to other magics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.kernels import Kernel, kernel_with_ranks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel with two ranks that get plain cells."""
    with kernel_with_ranks() as kernel:
        said = kernel.run("%ddp auto on").stdout
        assert said.startswith("ddpilot: auto is on: plain cells run on the ranks")
        yield kernel


def test_plain_cells_run_on_the_ranks_and_local_ones_in_the_notebook(kernel: Kernel) -> None:
    """Each has its variables."""
    assert kernel.run("where = rank\nwhere").by_rank == {0: ["0"], 1: ["1"]}
    local = kernel.run("%%ddp --local\nwhere = 'notebook'\nwhere")
    assert local.shown == ["'notebook'"]
    assert kernel.run("%%ddp --local\n%%time\nprint(where)").stdout.startswith("notebook\nCPU times")
    assert kernel.run("where").by_rank == {0: ["0"], 1: ["1"]}
    assert kernel.run("%%ddp --ranks 1\nwhere").stdout == "[rank 1] 1\n"


def test_errors_name_the_lines_of_the_notebooks_cell(kernel: Kernel) -> None:
    """There is no line of `%%ddp` above; lines of the notebook in between are counted."""
    assert "line 3\n" in kernel.run("x = 1\n\n1 / 0").stderr
    mixed = kernel.run("%ddp pull where --as pulled\ny = 2\n1 / 0")
    assert mixed.stdout == "ddpilot: `pulled` is now int from rank 0\n"
    assert "line 3\n" in mixed.stderr


def test_code_below_other_cell_magics_goes_to_the_ranks(kernel: Kernel) -> None:
    """They run in the notebook, and what they hand to IPython runs on the ranks."""
    timed = kernel.run("%%time\nprint('timed', rank)")
    assert timed.by_rank == {0: ["timed 0"], 1: ["timed 1"]}
    assert timed.stdout.count("Wall time") == 1
    kernel.run("%%capture caught\nprint('unseen', rank)")
    assert kernel.run("%%ddp --local\nprint(caught.stdout)").by_rank == {0: ["unseen 0"], 1: ["unseen 1"]}
    assert kernel.run("%%bash\necho $((1 + 1))").stdout == "2\n"


def test_magics_that_set_up_run_everywhere(kernel: Kernel) -> None:
    """A changed module is loaded again on the ranks, and a figure is drawn there."""
    set_up = kernel.run("%load_ext autoreload\n%autoreload 2\n%matplotlib inline")
    assert set_up.error + set_up.stderr == ""
    loaded = "'IPython.extensions.autoreload' in get_ipython().extension_manager.loaded"
    assert kernel.run(loaded).by_rank == {0: ["True"], 1: ["True"]}
    assert kernel.run(f"%%ddp --local\n{loaded}").shown == ["True"]
    kernel.run("%%ddp --ranks 0\nimport matplotlib.pyplot as plt")
    figure = kernel.run("%%ddp --ranks 0\nplt.plot([1, 2]); plt.show()")
    assert figure.shown[0] == "[rank 0]"
    assert "image/png" in figure.outputs[1]["data"]


def test_autoreload_loads_changed_modules_on_the_ranks(
    kernel: Kernel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The next cell sees the new code."""
    folder = tmp_path_factory.mktemp("reloaded")
    module = folder / "edited_while_running.py"
    module.write_text("def answer():\n    return 'old'\n")
    kernel.run("%load_ext autoreload\n%autoreload 2")
    kernel.run(f"import sys\nsys.path.insert(0, {str(folder)!r})\nimport edited_while_running")
    assert kernel.run("edited_while_running.answer()").by_rank == {0: ["'old'"], 1: ["'old'"]}
    module.write_text("def answer():\n    return 'it is new now'\n")
    assert kernel.run("edited_while_running.answer()").by_rank == {0: ["'it is new now'"], 1: ["'it is new now'"]}


def test_help_on_a_variable_of_the_ranks_is_shown(kernel: Kernel) -> None:
    """`x?` has no pager to go to."""
    kernel.run("def documented():\n    'What it does.'")
    assert "What it does." in kernel.run("documented?").stdout


def test_awaiting_cells_run_on_the_ranks(kernel: Kernel) -> None:
    """Top-level `await` works there as well."""
    assert kernel.run("import asyncio\nawait asyncio.sleep(0)\nprint('awaited')").by_rank == {
        0: ["awaited"],
        1: ["awaited"],
    }


def test_what_a_front_end_runs_for_itself_stays_in_the_notebook(kernel: Kernel) -> None:
    """A list of variables would otherwise come from everywhere."""
    kernel.run("from_front_end = 1", silent=True)
    assert kernel.run("%%ddp --local\nfrom_front_end").shown == ["1"]
    assert "NameError" in kernel.run("from_front_end").stderr


def test_completion_knows_the_ranks_variables_in_plain_cells(kernel: Kernel) -> None:
    """No `%%ddp` is needed for it."""
    kernel.run("only_on_ranks = 1")
    assert "only_on_ranks" in kernel.complete("x = 2\nonly_on_ra")


def test_loading_the_extension_again_keeps_ranks_and_auto(kernel: Kernel) -> None:
    """`%load_ext` twice, and `%reload_ext`."""
    kernel.run("lasting = rank * 0")
    assert "already loaded" in kernel.run("%load_ext ddpilot").stdout
    said = kernel.run("%reload_ext ddpilot")
    assert said.stdout.splitlines() == [
        "ddpilot: 2 ranks left running; `%load_ext ddpilot` makes them available again",
        "ddpilot: auto is still on",
    ]
    assert kernel.run("lasting").by_rank == {0: ["0"], 1: ["0"]}


def test_auto_off_gives_cells_back_to_the_notebook(kernel: Kernel) -> None:
    """And on again to the ranks."""
    assert kernel.run("%ddp auto off").stdout == "ddpilot: auto is off: plain cells run in the notebook\n"
    assert kernel.run("'here'").shown == ["'here'"]
    kernel.run("%ddp auto on")
    assert kernel.run("'there'").by_rank == {0: ["'there'"], 1: ["'there'"]}
