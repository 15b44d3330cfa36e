# SPDX-License-Identifier: Apache-2.0
"""Each rank gives the other a batch of messages and computes, and so does one that receives what comes later."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
given, taken = torch.full((4,), float(rank)), torch.zeros(4)
for _ in range(3):
    send, receive = dist.P2POp(dist.isend, given, 1 - rank), dist.P2POp(dist.irecv, taken, 1 - rank)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
time.sleep(3)
if rank == 0:
    time.sleep(4)
    dist.send(given, 1)
else:
    dist.recv(taken, 0)
    time.sleep(6)
assert taken[0].item() == 1 - rank
dist.barrier()
dist.destroy_process_group()
