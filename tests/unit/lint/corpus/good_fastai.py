# SPDX-License-Identifier: Apache-2.0
"""A fastai learner in a distributed context."""

from fastai.distributed import *
from fastai.vision.all import *


def main(path):
    rank0_first(lambda: path.ls())
    dls = ImageDataLoaders.from_folder(path, valid_pct=0.2, item_tfms=Resize(224))
    learn = vision_learner(dls, resnet34, metrics=error_rate)
    with learn.distrib_ctx():
        learn.fine_tune(1)
    learn.save("model")


if __name__ == "__main__":
    main(untar_data(URLs.PETS))
