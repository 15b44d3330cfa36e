# SPDX-License-Identifier: Apache-2.0
"""DataParallel for inference over two GPUs."""

import torch
from torch import nn
from torchvision.models import resnet18

model = nn.DataParallel(resnet18().cuda(), device_ids=[0, 1])  # expect: DDP330
model.eval()
with torch.no_grad():
    print(model(torch.zeros(8, 3, 224, 224).cuda()).shape)
