# SPDX-License-Identifier: Apache-2.0
"""What a profile says of parts of a program on real ranks: evaluation without DDP, and groups of some ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

import ddpilot


class Net(torch.nn.Module):
    """A model whose forward pass takes 2 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        """Sleep."""
        time.sleep(0.002)
        return self.layer(x)


def train(part: str) -> dict[str, float]:
    """Median milliseconds of the phases of updates that also do `part`."""
    loop = ddpilot.Loop(seed=0)
    model = Net()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    alone = [dist.new_group([rank]) for rank in range(loop.world_size)][loop.rank]
    data = torch.utils.data.TensorDataset(torch.randn(96, 4))
    with loop.profile() as profile:
        for (x,) in loop.batches(loop.loader(data, global_batch_size=8)):
            loop.backward(model(x).mean())
            loop.step(optimizer)
            if part == "evaluation":
                with torch.no_grad():
                    model.module(x)
            if part == "groups":
                time.sleep(0.005 * loop.rank)
                dist.all_reduce(torch.ones(1), group=alone)
    phases = profile.profile.phases
    return {name: 1e3 * phases.median(name) for name in ("forward", "evaluation", "waiting")}


def train_briefly(folder: Path) -> tuple[str, str, str, int]:
    """What is shown after three updates, and how many hooks remain."""
    loop = ddpilot.Loop(seed=0, progress=False)
    model = torch.nn.Linear(4, 1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    num_hooks = len(torch.nn.modules.module._global_forward_hooks)
    with loop.profile() as profile:
        for (x,) in loop.batches(loop.loader(torch.utils.data.TensorDataset(torch.randn(24, 4)), global_batch_size=8)):
            loop.backward(model(x).mean())
            loop.step(optimizer)
    path = folder / f"{loop.rank}.html"
    profile.to_html(path)
    with pytest.raises(ddpilot.RecordError, match="too few updates"):
        _ = profile.profile
    num_left = len(torch.nn.modules.module._global_forward_hooks) - num_hooks
    return str(profile), profile.summary, path.read_text("utf-8"), num_left


def test_too_few_updates_do_not_end_the_training(tmp_path: Path) -> None:
    """The texts state it instead; nothing is raised on exit from the block."""
    said = "no profile: too few updates: 3 on rank 0, 3 on rank 1"
    for shown, summary, page, num_left in ddpilot.launch(train_briefly, tmp_path, nproc_per_node=2):
        assert (shown, summary, num_left) == (said, said, 0)
        assert said in page


def test_the_module_without_ddp_is_evaluated() -> None:
    """Programs evaluate `model.module`."""
    for found in ddpilot.launch(train, "evaluation", nproc_per_node=2):
        assert found["evaluation"] > 2
        assert found["forward"] > 2


def test_collectives_of_groups_of_some_ranks_are_not_matched_by_their_order() -> None:
    """Nobody waits in a group of one's own."""
    for found in ddpilot.launch(train, "groups", nproc_per_node=2):
        assert found["waiting"] == 0


class SlowSamples(torch.utils.data.Dataset[Any]):
    """Samples that take 2 ms each."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return torch.full((4,), float(index))


def train_for_a_while() -> tuple[float, float, float]:
    """Profile from the third batch of a pass on: milliseconds of data, of an update by its phases, and by the clock."""
    loop = ddpilot.Loop(seed=0, progress=False)
    model = Net()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    running, ends_s = loop.profile(), []
    for number, x in enumerate(loop.batches(loop.loader(SlowSamples(), global_batch_size=4))):
        if number == 2:
            running.__enter__()
        loop.backward(model(x).mean())
        loop.step(optimizer)
        if number >= 2:
            ends_s.append(time.monotonic())
    running.__exit__(None, None, None)
    phases = running.profile.phases
    first = phases.first_update - 2
    lasted_s = (ends_s[-1] - ends_s[first]) / (len(ends_s) - 1 - first)
    return 1e3 * phases.median("data"), 1e3 * float(phases.durations_s[loop.rank].mean()), 1e3 * lasted_s


def test_phases_add_up_to_the_clock_and_a_pass_that_has_begun_has_data() -> None:
    """Within 2 % of what the program measures; two samples of 2 ms are loaded for an update."""
    for data_ms, update_ms, lasted_ms in ddpilot.launch(train_for_a_while, nproc_per_node=2):
        assert data_ms > 3.9
        assert update_ms == pytest.approx(lasted_ms, rel=0.02)


def train_plain(searches: bool, num_passes: int) -> tuple[Sequence[str], Any]:
    """Codes of the findings for plain DDP, and the text of the first line that is named."""
    loop = ddpilot.Loop(seed=0)
    with loop.profile() as profile:
        model = torch.nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=searches)  # THE MODEL
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            for _ in range(num_passes):
                model(torch.ones(2, 4)).mean().backward()  # THE PASS
            optimizer.step()
    judged = {each.code: each.place for each in profile.findings}
    return list(judged), {code: place.text for code, place in judged.items() if place is not None}


@pytest.mark.parametrize(
    ("searches", "num_passes", "code", "line"),
    [(True, 1, "DDP742", "THE MODEL"), (False, 3, "DDP746", "THE PASS")],
)
def test_options_of_ddp_that_cost_without_use_are_named(searches: bool, num_passes: int, code: str, line: str) -> None:
    """A search that finds nothing, and gradients that are exchanged in each pass; with the line."""
    for codes, lines in ddpilot.launch(train_plain, searches, num_passes, nproc_per_node=2):
        assert code in codes
        assert line in lines[code]
        assert {"DDP742", "DDP746"} - {code} - set(codes)


def train_buckets(bucket_cap_mb: float) -> tuple[list[float], float, int, str]:
    """Overlapped seconds by rank, the part of an update that its phases are, how many updates were timed, the text."""
    torch.set_num_threads(1)
    loop = ddpilot.Loop(seed=0, progress=False)
    ends_s = []
    with loop.profile() as profile:
        net = torch.nn.Sequential(*(torch.nn.Linear(384, 384) for _ in range(12)))
        model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(24):
            model(torch.randn(64, 384)).square().mean().backward()
            optimizer.step()
            ends_s.append(time.monotonic())
    phases = profile.profile.phases
    first = phases.first_update - 2
    lasted_s = (ends_s[-1] - ends_s[first]) / (len(ends_s) - 1 - first)
    assert phases.overlapped_s is not None
    num_timed = int((~torch.tensor(phases.overlaps[loop.rank, :, 0]).isnan()).sum())
    part = float(phases.durations_s[loop.rank].mean()) / lasted_s
    return phases.overlapped_s.tolist(), part, num_timed, profile.summary


def test_buckets_overlap_with_the_backward_pass_and_a_single_one_cannot() -> None:
    """What overlaps is not in the sum of the phases, which is the duration of an update by the clock."""
    for bucket_cap_mb in (0.6, 100.0):
        for overlapped_s, part, num_timed, text in ddpilot.launch(train_buckets, bucket_cap_mb, nproc_per_node=2):
            assert part == pytest.approx(1, rel=0.02)
            assert num_timed >= (9 if bucket_cap_mb == 100 else 3)
            assert all(each > 0.0005 if bucket_cap_mb < 1 else each == 0 for each in overlapped_s)
            assert "| overlapped" in text


def train_unevenly() -> tuple[float, list[str], list[float]]:
    """Share of time that rank 1 shadows, the findings, and how many updates each rank has samples in."""
    torch.set_num_threads(1)
    loop = ddpilot.Loop(seed=0, progress=False)
    with loop.profile() as profile:
        model = torch.nn.parallel.DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with Join([model]):
                for _ in range(12 - 6 * loop.rank):
                    optimizer.zero_grad()
                    model(torch.ones(2, 4)).mean().backward()
                    optimizer.step()
    phases = profile.profile.phases
    shadow_s = phases.share("shadow")
    share = float(shadow_s[1].sum() / phases.durations_s[1].sum())
    assert not shadow_s[0].any()
    return share, [each.summary for each in profile.findings if each.code == "DDP754"], (shadow_s > 0).sum(1).tolist()


def test_a_rank_that_runs_out_of_batches_shadows_the_others() -> None:
    """Of 36 updates of both ranks 4 warm up; rank 1 has batches in 6 of 12 in each of three epochs."""
    for share, found, counts in ddpilot.launch(train_unevenly, nproc_per_node=2):
        assert counts == [0, 18]
        assert 0.05 < share < 0.95  # which of the two is slower depends on what else the machine does
        assert len(found) == 1
        assert found[0].startswith(f"rank 1 runs out of batches before the others: for {share:.0%} of the time ")
