# SPDX-License-Identifier: Apache-2.0
"""The meeting point's name does not resolve: torch tries for a long time, and says no more than that."""

# without: hang
# finding: DDP104

import torch.distributed as dist

dist.init_process_group("gloo", init_method="tcp://no-such-host.invalid:29556", rank=0, world_size=2)  # HERE
