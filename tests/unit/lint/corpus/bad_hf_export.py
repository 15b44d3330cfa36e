# SPDX-License-Identifier: Apache-2.0
import os
import numpy as np
import torch
import transformers
from transformers import DataCollatorWithPadding
from transformers import Trainer as HFTrainer
from transformers import TrainingArguments as Args


class Exporter(transformers.TrainerCallback):
    """Export the weights each time the trainer saves."""

    def on_save(self, args, state, control, **kwargs):
        self.write(kwargs["model"], args.output_dir)

    def write(self, model, folder):
        torch.save(model.state_dict(), os.path.join(folder, "export.bin"))  # expect: DDP603


def main(train_set, dev_set):
    effective_batch_size = 64
    config = Args(
        output_dir="out",
        per_device_train_batch_size=effective_batch_size,  # expect: DDP414
        learning_rate=2e-5,
    )
    net = transformers.AutoModel.from_pretrained("roberta-base")
    net = torch.nn.DataParallel(net)  # expect: DDP330
    t = HFTrainer(net, config, train_dataset=train_set, eval_dataset=dev_set, callbacks=[Exporter()])
    t.train()
    if int(os.environ.get("RANK", 0)) == 0:
        scores = t.evaluate()  # expect: DDP220
        np.save("scores.npy", scores)


if __name__ == "__main__":
    main(None, None)
