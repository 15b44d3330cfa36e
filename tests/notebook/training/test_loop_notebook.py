# SPDX-License-Identifier: Apache-2.0
"""A loop of one's own in a real notebook: its bar, the stop button, workers; on launched ranks and in a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.kernels import Kernel

SETUP = """
import random, time, torch, ddpilot
from torch.utils.data import Dataset, TensorDataset, get_worker_info

def train(num_epochs=10_000):
    loop = ddpilot.Loop(seed=0)
    model = torch.nn.Linear(2, 1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = loop.loader(TensorDataset(torch.ones(400, 2)), global_batch_size=4)
    for epoch in loop.epochs(num_epochs):
        for x, in loop.batches(loader):
            with loop.accumulate(model):
                loop.backward(model(x).square().mean())
            loop.step(optimizer)
            time.sleep(0.01)
            if loop.num_updates == 80:
                loop.print("update 80 is done", flush=True)
    return model, loop.stop_reasons, loop.num_updates

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

torch.ones(300, 300) @ torch.ones(300, 300)
%load_ext ddpilot
%ddp start -n 2
alone = ddpilot.launch(read, 0, nproc_per_node=1)[0]
"""

LAUNCHED = """
results = ddpilot.launch(lambda: train()[1:], nproc_per_node=2)
print(results[0] == results[1], results[0][0], results[0][1] >= 80)
"""

IN_SESSION = """%%ddp
model, reasons, num_updates = train()
print("left", *reasons, num_updates >= 80)
"""

USED = """%%ddp
output = model(torch.ones(1, 2)).square().mean()
output.backward()
print(f"{output.item() < 1e-3} {model.module.weight.tolist()}")
"""

READ_LAUNCHED = "print('launched', ddpilot.launch(read, 2, nproc_per_node=2)[1] == alone, len(alone))"

READ_IN_SESSION = """%%ddp
print("in a session", read(1) == alone)
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """With two ranks, and the functions. torch was used here, and what one rank without workers reads is `alone`."""
    kernel = Kernel()
    try:
        done = kernel.run(SETUP)
        assert done.error == "", done.error
        yield kernel
    finally:
        kernel.close()


def test_the_stop_button_ends_a_loop_after_the_update_and_keeps_its_model(kernel: Kernel) -> None:
    """Launched: the function goes on after its loop, and what it returns is there; a bar was drawn meanwhile.

    In a session: the cell goes on, and the next one uses the model of every rank, over DDP.
    """
    stopped = kernel.run(LAUNCHED, interrupt_on="update 80 is done")
    assert stopped.error == "", stopped.error
    assert "True ('SIGINT',) True" in stopped.stdout
    assert "epoch 0 (1/10000)" in stopped.stderr
    assert " batches/s" in stopped.stderr

    assert kernel.run("%ddp push train").error == ""
    stopped = kernel.run(IN_SESSION, interrupt_on="update 80 is done")
    assert {rank: lines[-1] for rank, lines in stopped.by_rank.items()} == dict.fromkeys((0, 1), "left SIGINT True")
    used = kernel.run(USED)
    assert used.error == "", used.error
    assert len(used.by_rank) == 2
    assert used.by_rank[0] == used.by_rank[1]
    assert used.by_rank[0][0].startswith("True [[")


@pytest.mark.timeout(150)
def test_workers_read_a_dataset_from_a_cell_on_launched_ranks_and_in_a_session(kernel: Kernel) -> None:
    """The same samples, augmented alike, as one rank without workers reads; they do read in workers."""
    assert kernel.run("%ddp push Augmented collate read alone").error == ""
    launched = kernel.run(READ_LAUNCHED)
    assert launched.stdout == "launched True 6\n", launched.error
    in_session = kernel.run(READ_IN_SESSION)
    assert in_session.by_rank == {rank: ["in a session True"] for rank in (0, 1)}, in_session.error
