# SPDX-License-Identifier: Apache-2.0
"""The fixed port of the rendezvous is taken by a run of before."""

# without: error
# finding: DDP103, rank 0

import os
import socket

import torch.distributed as dist

if os.environ["RANK"] == "0":
    stale = socket.create_server(("127.0.0.1", 0))
    dist.TCPStore("127.0.0.1", stale.getsockname()[1], 2, is_master=True)  # HERE
