# SPDX-License-Identifier: Apache-2.0
"""Workers of a loader in a real notebook: the dataset's class is from a cell, on launched ranks and in a session."""

from __future__ import annotations

import pytest

from tests.notebook.kernels import Kernel

SETUP = """
import random, torch, ddpilot
from torch.utils.data import Dataset, get_worker_info

torch.ones(300, 300) @ torch.ones(300, 300)

class Augmented(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, number):
        return number, random.random() + torch.rand(()).item(), get_worker_info() is not None

def collate(samples):
    return [list(column) for column in zip(*samples)]

def read(num_workers):
    loop = ddpilot.Loop(seed=3)
    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0, "collate_fn": collate}
    loader = loop.loader(Augmented(), global_batch_size=4, shuffle=True, **options)
    seen = []
    for _ in loop.epochs(2):
        for batch in loop.batches(loader):
            seen += [sorted(zip(*loop.gather({"ids": batch[0], "drawn": batch[1]}).values()))]
            assert all(batch[2]) == (num_workers > 0) or not batch[2]
    return seen

%load_ext ddpilot
alone = ddpilot.launch(read, 0, nproc_per_node=1)[0]
"""

LAUNCHED = "print('launched', ddpilot.launch(read, 2, nproc_per_node=2)[1] == alone, len(alone))"

IN_SESSION = """
%ddp start -n 2
%ddp push Augmented collate read alone
"""

IN_CELL = """%%ddp
print("in a session", read(1) == alone)
"""


@pytest.mark.timeout(150)
def test_workers_read_a_dataset_from_a_cell_on_launched_ranks_and_in_a_session() -> None:
    """The same samples, augmented alike, as one rank without workers reads; they do read in workers."""
    kernel = Kernel()
    try:
        for source in (SETUP, IN_SESSION):
            done = kernel.run(source)
            assert done.error == "", done.error
        launched = kernel.run(LAUNCHED)
        assert launched.stdout == "launched True 6\n", launched.error
        in_session = kernel.run(IN_CELL)
        assert in_session.by_rank == {rank: ["in a session True"] for rank in (0, 1)}, in_session.error
    finally:
        kernel.close()
