# SPDX-License-Identifier: Apache-2.0
"""Ranks that stay, as a person in JupyterLab has them: what the page shows, and what the buttons do."""

from __future__ import annotations

import re
import time

import psutil
import pytest

from benchmarks.leftovers import settle
from tests.browser.conftest import OpenNotebook
from tests.browser.lab import Lab
from tests.browser.person import NotebookTab, failed
from tests.test_docs import by_rank

pytestmark = pytest.mark.browser

START = "%load_ext ddpilot\n%ddp start -n 2"
SUM = "%%ddp\nimport torch\nkept = torch.ones(1)\ntorch.distributed.all_reduce(kept)\nprint('sum', kept.item())"
STILL_THERE = "%%ddp\ntorch.distributed.all_reduce(kept)\nprint('again', kept.item())"


def printed(text: str) -> set[str]:
    """What each rank printed, in any order: on a busy machine ranks are too far apart to share a line."""
    return {line for shown in text.splitlines() for line in by_rank(shown)}


def open_with(lab: Lab, open_tab: OpenNotebook, *cells: str) -> NotebookTab:
    """A notebook of these cells below two that start ranks and form a group, which have run."""
    tab = open_tab(lab.put("ranks.ipynb", [START, SUM, *cells]))
    assert re.search(r"2 ranks ready in \d", tab.run(0))
    assert printed(tab.run(1)) == {"[rank 0] sum 2.0", "[rank 1] sum 2.0"}
    return tab


@pytest.mark.timeout(180)
def test_an_error_on_one_rank_is_on_the_page_while_the_other_waits(lab: Lab, open_tab: OpenNotebook) -> None:
    """The traceback of the rank that raised, with the cell's line, in light and dark; variables and group survive."""
    wrong = "%%ddp\nif rank == 1:\n    raise ValueError('bad sample')\ngroup.barrier()"
    tab = open_with(lab, open_tab, wrong, STILL_THERE)
    shown = tab.run(2)
    assert "rank 1 raised ValueError: bad sample" in shown
    assert re.search(r"Cell In\[3\], line 3", shown)
    assert "variables are kept" in shown
    assert failed(tab.saved_cells()) == [2]
    tab.photograph("error-light", 2)
    assert printed(tab.run(3)) == {"[rank 0] again 4.0", "[rank 1] again 4.0"}
    tab.theme("Dark")
    tab.photograph("error-dark", 2)


@pytest.mark.timeout(180)
def test_the_stop_button_frees_a_rank_from_a_collective(lab: Lab, open_tab: OpenNotebook) -> None:
    """Pressed while rank 0 alone is in a barrier: the prompt is back within 3 s, the next cell's collective works."""
    stuck = "%%ddp\nprint('before the barrier')\nif rank == 0:\n    group.barrier()"
    tab = open_with(lab, open_tab, stuck, STILL_THERE)
    tab.start(2)
    tab.see(2, "before the barrier")
    tab.photograph("stuck-in-a-barrier")
    pressed_s = time.monotonic()
    tab.press_stop()
    shown = tab.wait(2)
    took_s = time.monotonic() - pressed_s
    tab.photograph("stopped-light", 2)
    assert "KeyboardInterrupt" in shown
    assert took_s < 3
    assert printed(tab.run(3)) == {"[rank 0] again 4.0", "[rank 1] again 4.0"}


@pytest.mark.timeout(180)
def test_input_in_a_rank_asks_on_the_page(lab: Lab, open_tab: OpenNotebook) -> None:
    """The box says which rank asks; what is typed there is what that rank reads."""
    tab = open_with(lab, open_tab, "%%ddp --ranks 1\nname = input('your name? ')\nprint('hello', name)")
    tab.start(2)
    tab.see(2, "[rank 1] your name?")
    tab.photograph("input", 2)
    tab.answer(2, "Ada")
    assert "[rank 1] hello Ada" in tab.wait(2)


@pytest.mark.timeout(180)
def test_bars_figures_and_tables_of_ranks_are_on_the_page(lab: Lab, open_tab: OpenNotebook) -> None:
    """A widget's bar fills up; a figure that both ranks draw alike is there once, one that differs once per rank."""
    bar = "%%ddp\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(20), desc='steps'): pass"
    curve = "%%ddp\n%matplotlib inline\nimport matplotlib.pyplot as plt\n"
    same = f"{curve}plt.figure(figsize=(4, 2)); plt.plot([3, 1, 2]); plt.show()"
    apart = f"{curve}plt.figure(figsize=(4, 2)); plt.plot([rank, 1]); plt.show()"
    tab = open_with(lab, open_tab, bar, same, apart)
    tab.run(2)
    tab.see(2, re.compile(r"steps:\s*100%.*20/20", re.DOTALL))
    tab.run(3)
    tab.run(4)
    tab.photograph("widgets-and-figures-light")
    assert len(tab.images(3)) == 1
    assert len(tab.images(4)) == 2
    assert "ranks 0,1" in tab.output(3)
    assert "rank 0" in tab.output(4)
    assert "rank 1" in tab.output(4)
    tab.theme("Dark")
    tab.photograph("widgets-and-figures-dark")


@pytest.mark.timeout(180)
def test_the_board_changes_in_place_while_a_cell_runs(lab: Lab, open_tab: OpenNotebook) -> None:
    """Idle, waiting in a collective at the cell's line, dead: one table, in light and dark, with numbers in it."""
    stuck = "%%ddp\nif rank == 0:\n    group.barrier()"
    killed = "%%ddp --ranks 1\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    tab = open_with(lab, open_tab, "%ddp status --live", stuck, killed)
    tab.run(2)
    tab.see(2, "2 ranks: 2 idle")
    tab.photograph("board-idle-light", 2)
    tab.start(3)
    tab.see(2, re.compile(r"waiting in barrier for ([2-9]|\d\d) s at Cell In\[4\]:3"))
    tab.photograph("board-waiting-light", 2)
    tab.photograph("board-light")
    tab.theme("Dark")
    tab.photograph("board-waiting-dark", 2)
    tab.press_stop()
    tab.wait(3)
    tab.see(2, "2 ranks: 2 idle")
    tab.run(4)
    tab.see(2, "dead: was killed by SIGKILL")
    tab.photograph("board-dead-dark", 2)
    tab.photograph("board-dark")
    tab.theme("Light")
    tab.photograph("board-dead-light", 2)
    board = tab.cell(2).locator(".ddpilot-board")
    assert board.count() == 1
    rank_0 = board.locator("tbody tr").first.locator("td").all_inner_texts()
    assert re.fullmatch(r"\d+ %", rank_0[2])
    assert re.fullmatch(r"\d+ MB", rank_0[3])
    assert int(rank_0[4]) > 1


@pytest.mark.timeout(180)
def test_restarting_the_kernel_ends_its_ranks(lab: Lab, open_tab: OpenNotebook) -> None:
    """When the kernel is back the old ranks are gone within 2 s, and new ones can be started."""
    tab = open_with(lab, open_tab, "%%ddp\nimport os\nprint('pid', os.getpid())", START)
    pids = {int(pid) for pid in re.findall(r"pid (\d+)", tab.run(2))}
    assert len(pids) == 2
    assert all(map(psutil.pid_exists, pids))
    tab.restart_kernel()
    assert settle(lambda: [str(pid) for pid in pids if psutil.pid_exists(pid)], grace_s=2) == []
    assert re.search(r"2 ranks ready in \d", tab.run(3))
