# SPDX-License-Identifier: Apache-2.0
"""`%%ddp` in a real Jupyter kernel with two ranks: what a front end shows of a cell, also with `%ddp auto on`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

import pytest

from tests.notebook.kernels import Kernel, kernel_with_ranks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel with two ranks, and the names that most cells need."""
    with kernel_with_ranks() as kernel:
        named = kernel.run("%%ddp\nimport sys, time\nfrom IPython.display import HTML, clear_output, display")
        assert named.failure == ""
        yield kernel


def test_cell_labels_lines(kernel: Kernel) -> None:
    """stdout, stderr, C++ and the value of the last line."""
    cell = kernel.run(
        "%%ddp\nprint('hello from', rank)\nprint('careful', file=sys.stderr)\n"
        "import os; os.write(1, b'past Python\\n')\nrank - 7"
    )
    for rank in (0, 1):
        # What comes past Python has a way of its own.
        assert sorted(cell.by_rank[rank]) == sorted([f"hello from {rank}", "past Python", str(rank - 7)])
    assert set(re.findall("rank.*", cell.stderr)) <= {"ranks 0,1] careful", "rank 0] careful", "rank 1] careful"}
    assert "careful" in cell.stderr
    assert cell.shown == []


def test_cell_shows_a_line_while_it_grows(kernel: Kernel) -> None:
    """Dots without a newline come while the cell runs, from whichever rank; at the end the line stands there once."""
    cell = kernel.run(
        "%%ddp\nif rank:\n    print('loading.', end='', flush=True)\n    time.sleep(1.0)\n    print('done')"
    )
    texts = [(at_s, each["content"]["text"]) for at_s, each in cell.messages if each["msg_type"] == "stream"]
    first_s, last_s = (next(at_s for at_s, text in texts if word in text) for word in ("loading.", "done"))
    assert last_s - first_s > 0.5
    assert cell.stdout.endswith("\r[rank 1] loading.done\n")


def test_cell_runs_on_the_ranks_that_were_asked_for(kernel: Kernel) -> None:
    """One rank, quietly, or everywhere."""
    assert kernel.run("%%ddp --ranks 1\nprint(rank)").stdout == "[rank 1] 1\n"
    assert kernel.run("%%ddp --quiet\nprint(rank)\nquiet = True").outputs == []
    cell = kernel.run("%%ddp --everywhere\nplace = 'here'\nplace")
    assert cell.by_rank == {0: ["'here'"], 1: ["'here'"]}
    assert cell.shown == ["'here'"]
    alone = kernel.run("%%ddp --ranks 0\nimport torch\ntorch.distributed.barrier()")
    assert " torch.distributed.barrier()" in alone.stderr
    refused = "entering the group of 2 ranks: this cell runs on rank 0 only, but rank 1 must enter it too"
    assert f"GroupError: [rank 0] {refused}" in alone.stderr
    assert ".py" not in alone.stderr  # of torch or ddpilot
    wrong = kernel.run("%%ddp --ranks 0,7\n1")
    assert wrong.error == (
        "UsageError: running a cell on the ranks: `--ranks 7`, and the ranks are 0 to 1. Give ranks that exist, as in "
        "`--ranks 1`"
    )


def test_cell_shows_objects_once_for_all_ranks_on_which_they_look_alike(kernel: Kernel) -> None:
    """Same figure: one, with both ranks above it, also where a rank is late; different ones: each below its label."""
    same = kernel.run("%%ddp\n%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()")
    assert same.shown == ["[ranks 0,1]", "<Figure size 640x480 with 1 Axes>"]
    assert same.outputs[1]["data"]["image/png"]
    late = kernel.run("%%ddp\ntime.sleep(0.3 * rank)\ndisplay(HTML('<b>table</b>'))")
    assert [output["data"].get("text/html") for output in late.outputs][1:] == ["<b>table</b>"]
    assert late.shown[0] == "[ranks 0,1]"
    apart = kernel.run("%%ddp\ndisplay(HTML(f'<b>{rank}</b>'))\nprint('below')")
    shown = [re.sub("<div.*?>|</div>", "", output["data"]["text/html"]) for output in apart.outputs if "data" in output]
    pairs = list(zip(shown[::2], shown[1::2], strict=True))
    assert sorted(pairs) == [("[rank 0]", "<b>0</b>"), ("[rank 1]", "<b>1</b>")]
    assert apart.by_rank == {0: ["below"], 1: ["below"]}


def test_cell_updates_displays_in_place_also_those_of_earlier_cells(kernel: Kernel) -> None:
    """Both ranks use the same id; where they end apart, each is seen."""
    first = kernel.run("%%ddp\nhandle = display(HTML('start'), display_id='mine')")
    kernel.run("%%ddp\nfor step in range(20):\n    handle.update(HTML(f'step {step}'))")
    assert [output["data"]["text/html"] for output in first.outputs][1:] == ["step 19"]
    apart = kernel.run("%%ddp\nhandle.update(HTML(f'end {rank}'))")
    assert [output["data"]["text/html"] for output in first.outputs][1:] == ["end 0"]
    assert [output["data"]["text/html"] for output in apart.outputs][1:] == ["end 1"]
    assert (first.shown[0], apart.shown[0]) == ("[rank 0]", "[rank 1]")


def test_cell_clears_what_the_rank_has_shown_that_asks(kernel: Kernel) -> None:
    """A loop on all ranks leaves its last step; one rank's clearing leaves the other's lines."""
    loop = kernel.run(
        "%%ddp\nfor i in range(4):\n    clear_output(wait=True)\n    print('step', i)\n    time.sleep(0.07)"
    )
    assert loop.by_rank == {0: ["step 3"], 1: ["step 3"]}
    one = kernel.run(
        "%%ddp\nprint('mine', rank)\ntime.sleep(0.3)\nif rank == 1:\n    clear_output(wait=True)\n    print('new')"
    )
    assert one.by_rank == {0: ["mine 0"], 1: ["new"]}


def test_cell_shows_progress_of_one_rank(kernel: Kernel) -> None:
    """A bar that redraws itself is rank 0's, and at 100 % at the end."""
    cell = kernel.run("%%ddp\nfrom tqdm import tqdm\nfor _ in tqdm(range(10)):\n    time.sleep(0.02)\nprint('over')")
    assert cell.stderr.splitlines()[-1].startswith("[rank 0] 100%|")
    assert "[rank 1]" not in cell.stderr
    assert cell.by_rank == {0: ["over"], 1: ["over"]}


def test_cell_shows_a_line_within_100_ms(kernel: Kernel) -> None:
    """From `print` on one rank to the front end, while the cell runs on."""
    cell = kernel.run("%%ddp\nfor _ in range(10):\n    print(time.monotonic())\n    time.sleep(0.12)")
    delays_s = [
        came_s - float(line.split()[-1])
        for came_s, message in cell.messages
        if message["msg_type"] == "stream"
        for line in message["content"]["text"].splitlines()
    ]
    assert len(delays_s) == 20
    assert statistics.median(delays_s) < 0.1, delays_s


@pytest.mark.parametrize(
    ("code", "num", "num_lines"),
    [("print('some line', i, '-' * 60)", 30_000, 30_000), ("sys.stdout.write('x' * 99)", 100_000, 1)],
)
def test_cell_that_floods_the_notebook_is_cut_off_and_counted(
    kernel: Kernel, code: str, num: int, num_lines: int
) -> None:
    """30,000 lines, or 10 MB in one: about 1 MB of each rank is shown, the rest is counted."""
    cell = kernel.run(f"%%ddp\nfor i in range({num}):\n    {code}")
    assert len(cell.stdout) < 4_500_000  # two ranks, with labels in front of lines
    assert len(cell.stdout.splitlines()) > num_lines // 4
    assert len(cell.messages) < 5000
    assert re.search(r"ddpilot: \d+\.\d MB more output of rank \d not shown \(limit 1000000 bytes", cell.stderr)
    assert kernel.run("%%ddp\nprint('next')").by_rank == {0: ["next"], 1: ["next"]}


def test_input_asks_in_the_notebook_with_the_rank_in_front(kernel: Kernel) -> None:
    """Each rank that asks is answered; without anybody to ask, it is an error there."""
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return prompt[len("[rank ") :][0]

    cell = kernel.run("%%ddp\nprint('you are', input('Who? '))", answer=answer)
    assert sorted(prompts) == ["[rank 0] Who? ", "[rank 1] Who? "]
    assert cell.by_rank == {0: ["you are 0"], 1: ["you are 1"]}
    assert "EOFError" in kernel.run("%%ddp\ninput('Who? ')").stderr


def test_error_is_shown_once_with_the_cells_line_and_stops_run_all(kernel: Kernel) -> None:
    """In full when it happens, and one line where IPython would show it again; variables are kept."""
    number = int(kernel.run("print(len(In) - 1)").stdout) + 1
    cell = kernel.run("%%ddp\n\nkept = rank\nif rank == 1:\n    raise ValueError('bad sample')\ngroup.barrier()")
    assert cell.stderr.startswith(f"RankError: rank 1 raised ValueError: bad sample (running `Cell In[{number}]`")
    assert f"Cell In[{number}], line 5\n" in cell.stderr
    assert cell.stderr.count("bad sample") == 3  # in the sentence, in the line, at its end
    assert cell.error_name == "RankError"
    assert cell.error == "RankError: rank 1 raised ValueError: bad sample (the full error is above)"
    after = kernel.run("%%ddp\nimport torch\nx = torch.ones(1)\ntorch.distributed.all_reduce(x)\nprint(kept, x.item())")
    assert after.by_rank == {0: ["0 2.0"], 1: ["1 2.0"]}


def test_stop_button_ends_a_cell_on_the_ranks(kernel: Kernel) -> None:
    """One line says how, and the next cell runs."""
    cell = kernel.run("%%ddp\nprint('go')\nwhile True:\n    time.sleep(0.01)", interrupt_on="go")
    assert cell.error.startswith("KeyboardInterrupt: Cell In[")
    assert len(cell.error.splitlines()) == 1
    assert kernel.run("%%ddp\nrank").by_rank == {0: ["0"], 1: ["1"]}


def test_other_cell_magics_work_below(kernel: Kernel) -> None:
    """`%%ddp` and then `%%time`: on every rank."""
    cell = kernel.run("%%ddp\n%%time\ntimed = 3")
    assert [len(lines) for lines in cell.by_rank.values()] == [2, 2]  # CPU times, wall time
    assert kernel.run("%%ddp\ntimed").by_rank == {0: ["3"], 1: ["3"]}


def test_values_go_to_the_ranks_and_come_back(kernel: Kernel) -> None:
    """push, pull of one and of all, an expression, a call; overwritten variables are named."""
    kernel.run("losses = [1.0]\ndef scale(x, by=2):\n    print('scaling')\n    return x * by")
    assert kernel.run("%ddp push losses scale").outputs == []
    kernel.run("%%ddp\nlosses = [loss + rank for loss in losses]")
    said = kernel.run("%ddp pull losses --rank 1").stdout
    assert said == "ddpilot: `losses` is now list of 1 from rank 1; the notebook's own (list) was replaced\n"
    assert kernel.run("%ddp pull losses[0] --as first --all\nfirst").shown == ["[1.0, 2.0]"]
    called = kernel.run("results = %ddp run scale(3, by=first[1])\nprint(list(results))")
    assert called.by_rank == {0: ["scaling"], 1: ["scaling"]}
    assert called.stdout.endswith("\n[6.0, 6.0]\n")
    missing = kernel.run("%ddp pull lossse")
    assert missing.stderr == ""
    assert missing.error == (
        "LaunchError: pulling `lossse` from rank 0: there is no variable of that name. Did you mean `losses`?"
    )
    spaced = kernel.run('%ddp pull {"of": rank, "loss": losses[0]} --as told --all\ntold')
    assert spaced.shown == ["[{'of': 0, 'loss': 1.0}, {'of': 1, 'loss': 2.0}]"]
    assert "`--as both` for losses rank" in kernel.run("%ddp pull losses rank --as both").error
    unnamed = kernel.run("%ddp pull losses[0]")
    assert unnamed.error.endswith("is not a variable name. Give it one: `%ddp pull losses[0] --as value`")
    assert "Did you mean `losses`?" in kernel.run("%ddp push losse").error
    for verb in ("push nope", "pull nope", "run nope(1)"):
        assert "Did you mean" not in kernel.run(f"%ddp {verb}").error  # not IPython's own `open`
    assert "`arr[0`: that is not a Python expression: '[' was never closed" in kernel.run("%ddp pull arr[0").error
    assert "`rank` is set by the session on every rank" in kernel.run("rank = 7\n%ddp push rank").error
    assert "Write a call: `%ddp run train(model, epochs=3)`" in kernel.run("%ddp run scale").error
    kernel.run("%%ddp\ndef on_ranks(x): return x")
    assert kernel.run("%ddp run on_ranks(1)").error == (
        "UsageError: running `on_ranks(1)`: `on_ranks` is on the ranks, not in the notebook. Call it in `%%ddp`"
    )
    assert "`losse` is not in the notebook. Did you mean `losses`?" in kernel.run("%ddp run scale(losse)").error
    kernel.run("def fails(x):\n    return x / 0  # here")
    assert re.search(
        r"Cell In\[\d+\], line 2, in fails\n +return x / 0  # here", kernel.run("%ddp run fails(1)").stderr
    )


def test_start_with_the_same_options_keeps_the_ranks_and_with_others_says_what_to_type(kernel: Kernel) -> None:
    """Running the start cell again is no mistake."""
    kernel.run("%%ddp\nstays = 1")
    again = kernel.run("%ddp start -n 2")
    assert again.stdout == "ddpilot: 2 ranks already running, with their variables\n"
    other = kernel.run("%ddp start -n 3 --seed 1")
    assert other.error == (
        "UsageError: `%ddp start -n 3 --seed 1`: 2 ranks already running, started by `%ddp start -n 2`. "
        "Keep them, or type `%ddp stop` (their variables are lost) and then `%ddp start -n 3 --seed 1`"
    )
    assert kernel.run("%%ddp\nstays").by_rank == {0: ["1"], 1: ["1"]}


def test_stacks_and_interrupt_answer_while_nothing_runs(kernel: Kernel) -> None:
    """A line per rank; there is nothing to stop."""
    assert kernel.run("%ddp stacks").stdout == "[rank 0] idle\n[rank 1] idle\n"
    assert kernel.run("%ddp stacks 1").stdout == "[rank 1] idle\n"
    assert kernel.run("%ddp interrupt").stdout == "ddpilot: no cell is running on the ranks\n"


def test_completion_knows_the_variables_of_the_ranks(kernel: Kernel) -> None:
    """In cells of the ranks; a busy rank or a slow one is not waited for."""
    kernel.run("%%ddp\nclass Net:\n    hidden_size = 3\nmy_network = Net()")
    for code, found in (("%%ddp\nx = 1\nmy_netw", "my_network"), ("%%ddp\nmy_network.hid", ".hidden_size")):
        matches = kernel.complete(code)
        assert any(match.endswith(found) for match in matches), matches
    assert "start" in kernel.complete("%ddp star")
    assert kernel.complete("my_netw") == []
    kernel.run("my_numbers = [1]")
    assert kernel.complete("%ddp pull my_netw") == ["my_network"]
    assert kernel.complete("x = %ddp pull my_network.hid")[0].endswith(".hidden_size")
    assert kernel.complete("%ddp push my_num") == kernel.complete("%ddp run f(my_num") == ["my_numbers"]
    assert kernel.complete("%ddp restart ") == ["0", "1"]


def test_shift_tab_shows_an_object_of_the_ranks(kernel: Kernel) -> None:
    """In a cell of the ranks; the notebook's own objects as before."""
    kernel.run("%%ddp\ndef train(epochs: int) -> None:\n    'Train on this rank.'")
    assert "Train on this rank." in kernel.inspect("%%ddp\ntrain")
    assert "Return the number of items" in kernel.inspect("%%ddp\nlen")
    assert kernel.inspect("train") == ""


def test_missing_names_of_the_other_side_are_pointed_out(kernel: Kernel) -> None:
    """A name that the notebook has, or has imported, and one that the ranks have; a mere typo gets no hint."""
    kernel.run("import collections as several\nmy_table = 1")
    wrong = kernel.run("%%ddp\nmy_table")
    assert "The notebook has `my_table`: `%ddp push my_table` copies it to the ranks" in wrong.stderr
    wrong = kernel.run("%%ddp\nseveral.Counter()")
    assert "run `import collections as several` in a `%%ddp` cell too" in wrong.stderr
    assert "The notebook has" not in kernel.run("%%ddp\nmy_tabel").stderr
    kernel.run("%%ddp\nmy_loss = 1")
    wrong = kernel.run("my_loss")
    assert "`my_loss` is on the ranks: use it in a `%%ddp` cell, or copy it with `%ddp pull my_loss`" in wrong.stdout
    assert kernel.run("my_los").stdout == ""


def test_pull_in_an_expression_returns_and_push_sees_a_functions_variables(kernel: Kernel) -> None:
    """Alone, a pull sets variables and shows nothing; assigned, it sets nothing else."""
    kernel.run("%%ddp\nmine = rank + 10")
    cell = kernel.run("x = %ddp pull mine\nboth = %ddp pull mine rank --all\nsum_ = %ddp pull mine + 1\nx, both, sum_")
    assert cell.shown == ["(10, ([10, 11], [0, 1]), 11)"], cell.error
    assert "mine" not in kernel.run("print(*globals())").stdout.split()
    assert kernel.run("%ddp pull mine").shown == []
    wrong = kernel.run("%ddp pull mine as yours")
    assert wrong.error.endswith("Did you mean `%ddp pull mine --as yours`?")
    assert wrong.stdout == ""
    assert kernel.run("%ddp run print('said')").shown == []
    assert kernel.run("said = %ddp run print('said')\nlist(said)").shown == ["[None, None]"]
    cell = kernel.run(
        "def give(local_one):\n    %ddp push local_one\n    doubled = %ddp run (lambda: 2 * local_one)()\n"
        "    return list(doubled)\ngive(21)"
    )
    assert cell.shown == ["[42, 42]"], cell.error
    assert kernel.run("%%ddp\nlocal_one").by_rank == {0: ["21"], 1: ["21"]}


def test_threads_of_ranks_are_heard_between_cells(kernel: Kernel) -> None:
    """What comes when no cell runs stands below the last one."""
    cell = kernel.run(
        "%%ddp\nimport threading\nthreading.Timer(1.0, lambda: print('late', rank)).start()\nprint('done')"
    )
    assert cell.by_rank == {0: ["done"], 1: ["done"]}
    kernel.wait_for(lambda: "late 0" in cell.stdout and "late 1" in cell.stdout, "both threads' lines")


def test_capture_takes_what_the_ranks_print_show_and_raise(kernel: Kernel) -> None:
    """`%%capture` above `%%ddp` is IPython's own, in the notebook; it keeps each new label as one more output."""
    cell = "%%capture out\n%%ddp\nprint('x', rank)\nprint('e', file=sys.stderr)\ndisplay(HTML('<b>a</b>'))"
    assert kernel.run(cell).outputs == []
    assert kernel.run("sorted(out.stdout.split('\\n'))").shown == ["['', '[rank 0] x 0', '[rank 1] x 1']"]
    assert kernel.run("'e' in out.stderr, out.outputs[1].data['text/html']").shown == ["(True, '<b>a</b>')"]
    failed = kernel.run("%%capture out\n%%ddp --ranks 1\nraise ValueError('x')")
    assert failed.error == "RankError: rank 1 raised ValueError: x (the full error is in the captured output)"
    assert kernel.run("'ValueError' in out.stderr").shown == ["True"]


@pytest.fixture(scope="module")
def auto(kernel: Kernel) -> Kernel:
    """The same kernel, whose plain cells run on the ranks from here on, next to other magics."""
    said = kernel.run("%ddp auto on").stdout
    assert said.startswith("ddpilot: auto is on: plain cells run on the ranks")
    return kernel


def test_plain_cells_run_on_the_ranks_and_local_ones_in_the_notebook(auto: Kernel) -> None:
    """Each has its variables."""
    assert auto.run("where = rank\nwhere").by_rank == {0: ["0"], 1: ["1"]}
    local = auto.run("%%ddp --local\nwhere = 'notebook'\nwhere")
    assert local.shown == ["'notebook'"]
    assert auto.run("%%ddp --local\n%%time\nprint(where)").stdout.startswith("notebook\nCPU times")
    assert auto.run("where").by_rank == {0: ["0"], 1: ["1"]}
    assert auto.run("%%ddp --ranks 1\nwhere").stdout == "[rank 1] 1\n"


def test_errors_name_the_lines_of_the_notebooks_cell(auto: Kernel) -> None:
    """There is no line of `%%ddp` above; lines of the notebook in between are counted."""
    assert "line 3\n" in auto.run("x = 1\n\n1 / 0").stderr
    mixed = auto.run("%ddp pull where --as pulled\ny = 2\n1 / 0")
    assert mixed.stdout == "ddpilot: `pulled` is now int from rank 0\n"
    assert "line 3\n" in mixed.stderr


def test_code_below_other_cell_magics_goes_to_the_ranks(auto: Kernel) -> None:
    """They run in the notebook, and what they hand to IPython runs on the ranks."""
    timed = auto.run("%%time\nprint('timed', rank)")
    assert timed.by_rank == {0: ["timed 0"], 1: ["timed 1"]}
    assert timed.stdout.count("Wall time") == 1
    auto.run("%%capture caught\nprint('unseen', rank)")
    assert auto.run("%%ddp --local\nprint(caught.stdout)").by_rank == {0: ["unseen 0"], 1: ["unseen 1"]}
    assert auto.run("%%bash\necho $((1 + 1))").stdout == "2\n"


def test_magics_that_set_up_run_everywhere(auto: Kernel) -> None:
    """A changed module is loaded again on the ranks, and a figure is drawn there."""
    set_up = auto.run("%load_ext autoreload\n%autoreload 2\n%matplotlib inline")
    assert set_up.failure == ""
    loaded = "'IPython.extensions.autoreload' in get_ipython().extension_manager.loaded"
    assert auto.run(loaded).by_rank == {0: ["True"], 1: ["True"]}
    assert auto.run(f"%%ddp --local\n{loaded}").shown == ["True"]
    auto.run("%%ddp --ranks 0\nimport matplotlib.pyplot as plt")
    figure = auto.run("%%ddp --ranks 0\nplt.plot([1, 2]); plt.show()")
    assert figure.shown[0] == "[rank 0]"
    assert "image/png" in figure.outputs[1]["data"]


def test_autoreload_loads_changed_modules_on_the_ranks(auto: Kernel, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The next cell sees the new code."""
    folder = tmp_path_factory.mktemp("reloaded")
    module = folder / "edited_while_running.py"
    module.write_text("def answer():\n    return 'old'\n")
    auto.run("%load_ext autoreload\n%autoreload 2")
    auto.run(f"import sys\nsys.path.insert(0, {str(folder)!r})\nimport edited_while_running")
    assert auto.run("edited_while_running.answer()").by_rank == {0: ["'old'"], 1: ["'old'"]}
    module.write_text("def answer():\n    return 'it is new now'\n")
    assert auto.run("edited_while_running.answer()").by_rank == {0: ["'it is new now'"], 1: ["'it is new now'"]}


def test_help_on_a_variable_of_the_ranks_is_shown(auto: Kernel) -> None:
    """`x?` has no pager to go to."""
    auto.run("def documented():\n    'What it does.'")
    assert "What it does." in auto.run("documented?").stdout


def test_awaiting_cells_run_on_the_ranks(auto: Kernel) -> None:
    """Top-level `await` works there as well."""
    assert auto.run("import asyncio\nawait asyncio.sleep(0)\nprint('awaited')").by_rank == {
        0: ["awaited"],
        1: ["awaited"],
    }


def test_what_a_front_end_runs_for_itself_stays_in_the_notebook(auto: Kernel) -> None:
    """A list of variables would otherwise come from everywhere."""
    auto.run("from_front_end = 1", silent=True)
    assert auto.run("%%ddp --local\nfrom_front_end").shown == ["1"]
    assert "NameError" in auto.run("from_front_end").stderr


def test_completion_knows_the_ranks_variables_in_plain_cells(auto: Kernel) -> None:
    """No `%%ddp` is needed for it."""
    auto.run("only_on_ranks = 1")
    assert "only_on_ranks" in auto.complete("x = 2\nonly_on_ra")


def test_loading_the_extension_again_keeps_ranks_and_auto(auto: Kernel) -> None:
    """`%load_ext` twice, and `%reload_ext`."""
    auto.run("lasting = rank * 0")
    assert "already loaded" in auto.run("%load_ext ddpilot").stdout
    said = auto.run("%reload_ext ddpilot")
    assert said.stdout.splitlines() == [
        "ddpilot: 2 ranks left running; `%load_ext ddpilot` makes them available again",
        "ddpilot: auto is still on",
    ]
    assert auto.run("lasting").by_rank == {0: ["0"], 1: ["0"]}


def test_auto_off_gives_cells_back_to_the_notebook(auto: Kernel) -> None:
    """And on again to the ranks."""
    assert auto.run("%ddp auto off").stdout == "ddpilot: auto is off: plain cells run in the notebook\n"
    assert auto.run("'here'").shown == ["'here'"]
    auto.run("%ddp auto on")
    assert auto.run("'there'").by_rank == {0: ["'there'"], 1: ["'there'"]}
