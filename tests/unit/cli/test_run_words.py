# SPDX-License-Identifier: Apache-2.0
"""Which words are ours and which are the script's."""

from __future__ import annotations

import pytest

from ddpilot.cli.run_words import split_words
from ddpilot.errors import LaunchError


@pytest.mark.parametrize(
    ("line", "options", "args"),
    [
        ("train.py", {}, ""),
        ("train.py -n 4 -- --epochs 3", {"nproc-per-node": "4"}, "--epochs 3"),
        ("train.py -- -n 4", {}, "-n 4"),
        ("train.py -n4 --standalone -- a -- b", {"nproc-per-node": "4", "standalone": ""}, "a -- b"),
        ("--nproc-per-node 4 train.py --epochs 3", {"nproc-per-node": "4"}, "--epochs 3"),
        ("--nproc_per_node=4 train.py -n 2 --log-dir x", {"nproc-per-node": "4"}, "-n 2 --log-dir x"),
        ("--nproc_per_node=4 train.py -- --epochs 3", {"nproc-per-node": "4"}, "--epochs 3"),
        ("--nproc_per_node=4 train.py a -- b", {"nproc-per-node": "4"}, "a -- b"),
        ("--standalone -- train.py -n 2", {"standalone": ""}, "-n 2"),
        ("--master_addr=::1 --rdzv_conf=a=b,c=d train.py", {"master-addr": "::1", "rdzv-conf": "a=b,c=d"}, ""),
        ("-r3 -t 0:1,1:2 train.py -", {"redirects": "3", "tee": "0:1,1:2"}, "-"),
        ("--max-restarts 3 --monitor-interval=1 train.py", {"max-restarts": "3", "monitor-interval": "1"}, ""),
    ],
)
def test_split_words_tells_ours_from_the_scripts(line: str, options: dict[str, str], args: str) -> None:
    """The guide's order and torchrun's, dashes and underscores, a blank or an equals sign."""
    found = split_words(line.split())
    assert (found.options, found.script, " ".join(found.args)) == (options, "train.py", args)


def test_split_words_takes_a_module_in_both_orders() -> None:
    """-m is a switch; the module stands where the script would."""
    for line in ("-m pkg.train --epochs 3", "pkg.train -m -- --epochs 3"):
        found = split_words(line.split())
        assert (found.options, found.script, found.args) == ({"module": ""}, "pkg.train", ("--epochs", "3"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.py --epochs 3", "Arguments of the script come after `--`: ddpilot run train.py -- --epochs 3"),
        ("train.py -n 2 data -- x", "come after `--`: ddpilot run train.py -n 2 -- data x"),
        (
            "torch.distributed.launch --nproc_per_node=2 train.py",
            "Leave out `torch.distributed.launch`: ddpilot run --nproc_per_node=2 train.py",
        ),
        (
            "python -m torch.distributed.run -n 2 train.py -- -x",
            "Leave out `python -m torch.distributed.run`: ddpilot run -n 2 train.py -x",
        ),
        ("python train.py", "Leave out `python`: ddpilot run train.py"),
        ("--nproc-per-nod 2 train.py", "Did you mean --nproc-per-node?"),
        ("--nproc 2 train.py", "The option is --nproc-per-node, or -n"),
        ("--use_env train.py", "torch.distributed.launch's; LOCAL_RANK is always in the environment: leave it out"),
        ("--local_rank=0 train.py", "the script reads os.environ['LOCAL_RANK']"),
        ("--start-method fork train.py", "--start-method is not taken"),
        ("--numa-binding node train.py", "start it under numactl"),
        ("-n", "-n has no value"),
        ("train.py -n -- 4", "-n has no value"),
        ("--standalone=yes train.py", "--standalone takes no value"),
        ("-q train.py", "-q is not an option of `ddpilot run`"),
    ],
)
def test_split_words_says_the_right_words_when_it_cannot_tell(line: str, said: str) -> None:
    """Nothing is guessed and nothing is ignored: the error has what to write instead."""
    with pytest.raises(LaunchError) as caught:
        split_words(line.split())
    assert said in str(caught.value)
