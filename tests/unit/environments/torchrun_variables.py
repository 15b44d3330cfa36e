# SPDX-License-Identifier: Apache-2.0
"""What torchrun sets on the last of four ranks, of two nodes with two each."""

COMPLETE = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "17",
}
