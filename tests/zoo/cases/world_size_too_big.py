# SPDX-License-Identifier: Apache-2.0
"""Three ranks are expected, and two were started."""

# without: error
# finding: DDP105

import os
from datetime import timedelta

import torch.distributed as dist

port = 20_000 + int(os.environ["MASTER_PORT"]) % 9_000  # the system gives others those above 32,767
if os.environ["RANK"] == "0":
    dist.TCPStore("127.0.0.1", port, 3, is_master=True, timeout=timedelta(seconds=3))  # HERE
else:
    dist.TCPStore("127.0.0.1", port, 3, is_master=False, timeout=timedelta(seconds=3))
