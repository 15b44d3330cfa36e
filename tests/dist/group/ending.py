# SPDX-License-Identifier: Apache-2.0
"""The end of a script that leaves its group in use."""

END = """
import time
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo")
time.sleep = lambda _seconds: print("paused", flush=True)
print("the end", flush=True)
"""
"""Tells each pause after its last line."""
