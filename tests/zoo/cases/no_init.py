# SPDX-License-Identifier: Apache-2.0
"""A collective before there is a process group."""

# without: error
# finding: DDP110

import torch.distributed as dist

dist.barrier()  # HERE
