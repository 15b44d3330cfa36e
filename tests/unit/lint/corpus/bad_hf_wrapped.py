# SPDX-License-Identifier: Apache-2.0
import os
import torch
import transformers as tf
from torch.nn.parallel import DistributedDataParallel as DDP


class Push(tf.TrainerCallback):
    def on_save(self, args, state, control, **kw):
        kw["model"].save_pretrained(f"{args.output_dir}/extra-{state.global_step}")  # expect: DDP603
        return control


def steps(n, targs):
    return n // targs.per_device_train_batch_size * 3


def main(train_ds, eval_ds):
    local = int(os.environ.get("LOCAL_RANK", 0))
    model = tf.AutoModelForCausalLM.from_pretrained("gpt2").to(local)
    targs = tf.TrainingArguments(output_dir="o", per_device_train_batch_size=8, eval_strategy="epoch")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    total = len(train_ds) // targs.per_device_train_batch_size * targs.num_train_epochs  # expect: DDP414
    sched = tf.get_linear_schedule_with_warmup(opt, num_warmup_steps=100, num_training_steps=total)
    pair = (opt, sched)
    trainer = tf.Trainer(model=DDP(model), args=targs, train_dataset=train_ds, optimizers=pair)  # expect: DDP337
    trainer.add_callback(Push)
    trainer.train()
    trainer.model = torch.nn.DataParallel(trainer.model)  # expect: DDP330
    torch.save(trainer.model.state_dict(), "final.pt")  # expect: DDP603


if __name__ == "__main__":
    main(None, None)
