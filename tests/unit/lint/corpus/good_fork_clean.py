# SPDX-License-Identifier: Apache-2.0
import os
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
import torch
import torch.distributed as dist


def decode(path):
    return open(path).read()


def work(rank, size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29511"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    x = torch.ones(2)
    dist.all_reduce(x)
    if torch.cuda.is_available():
        x.cuda(rank)
    dist.destroy_process_group()


def main(size=2):
    with ProcessPoolExecutor(4) as pool:
        texts = list(pool.map(decode, ["a", "b"]))
    ctx = mp.get_context("fork")
    ps = [ctx.Process(target=work, args=(r, size)) for r in range(size)]
    for p in ps:
        p.start()
    for p in ps:
        p.join()
    after = torch.zeros(1, device="cuda:0") if torch.cuda.is_available() else None
    return texts, after


if __name__ == "__main__":
    main()
