# SPDX-License-Identifier: Apache-2.0
"""all_to_all_single with sizes that differ between ranks."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
for step in range(5):
    sizes = [1, 3] if rank == 0 else [3, 2]
    received = torch.empty(sum(sizes))
    dist.all_to_all_single(received, torch.ones(sum(sizes)), output_split_sizes=sizes, input_split_sizes=sizes)
dist.destroy_process_group()
