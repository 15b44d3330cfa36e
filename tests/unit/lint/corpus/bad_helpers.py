# SPDX-License-Identifier: Apache-2.0
"""Conditions of helpers, early returns, a barrier that rank 0 never sees."""

import os

import torch
import torch.distributed as dist


def get_rank():
    if not dist.is_available() or not dist.is_initialized():
        return 0
    return dist.get_rank()


def is_main_process():
    return get_rank() == 0


def log_metrics(metrics):
    if not is_main_process():
        return
    for name, value in metrics.items():
        dist.reduce(value, dst=0)  # expect: DDP208
        print(name, value)


def download(url, path):
    if is_main_process():
        torch.hub.download_url_to_file(url, path)
        dist.barrier()  # expect: DDP220


def sync_scalar(value):
    t = torch.tensor(value)
    dist.all_reduce(t)
    return t.item() / dist.get_world_size()


def summarize(history):
    mean = sync_scalar(history[-1]) if is_main_process() else None  # expect: DDP220
    if int(os.environ.get("LOCAL_RANK", 0)) == 0 and len(history) > 3:
        total = [sync_scalar(each) for each in history]  # expect: DDP220
        return total
    return mean
