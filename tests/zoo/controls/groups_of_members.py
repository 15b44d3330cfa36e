# SPDX-License-Identifier: Apache-2.0
"""Each group's collectives are called by its members alone."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group([0]), dist.new_group([1]), dist.new_group([0, 1])]
members = [[0], [1], [0, 1]]
for step in range(5):
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            dist.all_reduce(torch.ones(2), group=group)
            dist.barrier(group=group)
dist.destroy_process_group()
