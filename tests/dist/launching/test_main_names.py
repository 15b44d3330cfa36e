# SPDX-License-Identifier: Apache-2.0
"""What a cell or a script defines, inside the ranks: pickles that ranks make find it in ``__main__``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.launching.scripts import run_script
from tests.soak import soak

PICKLES = """
import io, torch, ddpilot
import torch.distributed as dist

class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return type(self) is type(other) and self.x == other.x

def helper(x): return x * 2

def train():
    import pickle, __main__
    assert __main__.Point is Point and __main__.helper is helper
    rank = ddpilot.init_group().rank
    gathered = [None] * 2
    dist.all_gather_object(gathered, {"point": Point(rank), "fn": helper})
    assert [one["point"] for one in gathered] == [Point(0), Point(1)] and gathered[0]["fn"] is helper
    file = io.BytesIO()
    torch.save({"point": Point(7)}, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)["point"] == Point(7)
    assert pickle.loads(pickle.dumps(Point)) is Point
    return gathered[1]["point"]

print([type(point) is Point and point.x for point in ddpilot.launch(train, nproc_per_node=2)])
"""

LOADERS = """
import torch, ddpilot
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 6
    def __getitem__(self, index): return index * index

def collate(items): return torch.tensor(items) + 1

def load(method):
    loader = DataLoader(Squares(), batch_size=3, num_workers=1, collate_fn=collate, multiprocessing_context=method)
    return [batch.tolist() for batch in loader]

for method in (None, "fork", "spawn", "forkserver"):
    print(list(ddpilot.launch(load, method, nproc_per_node=1)))
"""


VERSIONS = """
import ddpilot
exec("class Net:\\n    version = 1")
old = Net()
exec("class Net:\\n    version = 2")
def train(net):
    return net.version, Net().version, net, Net()
seen = ddpilot.launch(train, old, nproc_per_node=2)[1]
print(seen[:2], type(seen[2]) is type(old), type(seen[3]) is Net, Net.version, type(old).version)
"""


GLOBALS = """
import ddpilot
count = 0
def bump():
    global count
    count += 1
def train():
    bump(); bump()
    return count
print(list(ddpilot.launch(train, nproc_per_node=2)), count)
"""


@pytest.fixture(scope="module")
def of_a_script(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines that one script with all but the data loaders prints."""
    return run_script(PICKLES + VERSIONS + GLOBALS, tmp_path_factory.mktemp("script")).out.splitlines()


@pytest.fixture(scope="module")
def of_a_prompt(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines that code without a file prints: a prompt's comes through stdin."""
    return run_script(PICKLES + LOADERS, tmp_path_factory.mktemp("prompt"), through_stdin=True).out.splitlines()


def test_ranks_find_shipped_names_in_main(of_a_script: list[str]) -> None:
    """ "What was shipped is bound in the rank's `__main__`": all_gather_object, torch.save, torch.load, pickle work."""
    assert of_a_script[0] == "[1, 1]"


def test_launch_keeps_two_versions_of_one_class_apart(of_a_script: list[str]) -> None:
    """A cell that was run twice leaves instances of the old class; both come back as what they were."""
    assert of_a_script[1] == "(1, 2) True True 2 1"


def test_ranks_share_globals_among_functions_of_main(of_a_script: list[str]) -> None:
    """A global that one function changes is changed for all functions in that rank, and not in the parent."""
    assert of_a_script[2:] == ["[2, 2] 0"]


def test_ranks_find_shipped_names_when_the_code_has_no_file(of_a_prompt: list[str]) -> None:
    """The code of a prompt works as a script's does."""
    assert of_a_prompt[0] == "[1, 1]"


def test_data_loader_workers_of_every_start_method_find_shipped_names(of_a_prompt: list[str]) -> None:
    """DataLoader workers take a cell's Dataset and collate_fn, forked, spawned and from a fork server."""
    assert of_a_prompt[1:] == ["[[[1, 2, 5], [10, 17, 26]]]"] * 4


@soak
def test_data_loader_workers_of_a_script_find_shipped_names(tmp_path: Path) -> None:
    """As those of a prompt do."""
    assert run_script(LOADERS, tmp_path).out == "[[[1, 2, 5], [10, 17, 26]]]\n" * 4
