# SPDX-License-Identifier: Apache-2.0
"""Batches of the loader's workers do not fit into shared memory."""

# without: error
# finding: DDP601

import resource

import torch

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))  # as a full one
dataset = torch.utils.data.TensorDataset(torch.zeros(8, 1000, 1000))
for batch in torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=1):  # HERE
    pass
