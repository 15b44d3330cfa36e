# SPDX-License-Identifier: Apache-2.0
"""The script reads LOCAL_RANK, which srun does not set."""

# without: error
# finding: DDP102

import os

os.environ.pop("LOCAL_RANK")
device = int(os.environ["LOCAL_RANK"])  # HERE
