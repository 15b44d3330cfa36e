# SPDX-License-Identifier: Apache-2.0
from fastai.vision.all import *
from fastai.distributed import *


def go(path):
    dls = ImageDataLoaders.from_folder(path, bs=64)
    learn = vision_learner(dls, resnet34, metrics=accuracy)
    learn.to_parallel()  # expect: DDP330
    learn.fine_tune(1)
    with learn.distrib_ctx(in_notebook=False):
        learn.fit_one_cycle(3)
        if rank_distrib() == 0:
            print(learn.validate())  # expect: DDP220
        torch.save(learn.model.state_dict(), "m.pth")  # expect: DDP603
