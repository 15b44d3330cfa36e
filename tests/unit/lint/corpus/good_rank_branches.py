# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist


def exchange(rank, world):
    t = torch.zeros(1)
    if rank == 0:
        t += 1
        dist.broadcast(t, src=0)
        for peer in range(1, world):
            dist.send(t, dst=peer)
    else:
        dist.broadcast(t, src=0)
        dist.recv(t, src=0)
    if rank % 2 == 0 and rank + 1 < world:
        dist.send(t, rank + 1)
    elif rank % 2 == 1:
        dist.recv(t, rank - 1)
    return t


def prepare(rank, path):
    if rank != 0:
        dist.barrier()
    torch.hub.download_url_to_file("http://example.com/x", path)
    if rank == 0:
        dist.barrier()
    out = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object({"rank": rank}, out, dst=0)
    return out


def main(path):
    dist.init_process_group("gloo")
    try:
        exchange(dist.get_rank(), dist.get_world_size())
        prepare(dist.get_rank(), path)
    except KeyboardInterrupt:
        print("stopped")
        raise
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main("x")
