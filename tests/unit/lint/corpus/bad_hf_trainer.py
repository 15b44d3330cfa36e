# SPDX-License-Identifier: Apache-2.0
import os
import torch
import torch.nn as nn
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"

GLOBAL_BATCH_SIZE = 256


class SaveHead(TrainerCallback):
    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        torch.save(model.state_dict(), os.path.join(args.output_dir, f"head-{state.epoch}.pt"))  # expect: DDP603


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kw):
        labels = inputs.pop("labels")
        out = model(**inputs)
        weight = torch.tensor([1.0, 3.0]).to("cuda:0")  # expect: DDP118
        loss = nn.CrossEntropyLoss(weight=weight)(out.logits, labels)
        return (loss, out) if return_outputs else loss


def main():
    data = load_dataset("glue", "sst2")
    tok = AutoTokenizer.from_pretrained("bert-base-cased")
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased")
    args = TrainingArguments("out", per_device_train_batch_size=GLOBAL_BATCH_SIZE, num_train_epochs=3)  # expect: DDP414
    trainer = Weighted(  # expect: DDP330
        model=model, args=args, train_dataset=data["train"], callbacks=[SaveHead()], processing_class=tok
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(trainer.evaluate())  # expect: DDP220


if __name__ == "__main__":
    main()
