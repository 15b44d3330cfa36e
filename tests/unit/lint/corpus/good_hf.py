# SPDX-License-Identifier: Apache-2.0
import os
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

os.environ["CUDA_VISIBLE_DEVICES"] = "0"
GLOBAL_BATCH = 256


class Save(TrainerCallback):
    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        if state.is_world_process_zero:
            torch.save(model.state_dict(), f"{args.output_dir}/x.pt")

    def on_log(self, args, state, control, logs=None, **kw):
        if not state.is_local_process_zero:
            return
        print(logs)


def main(ds):
    world = int(os.environ.get("WORLD_SIZE", 1))
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    args = TrainingArguments("o", per_device_train_batch_size=GLOBAL_BATCH // world)
    total = len(ds) // (args.per_device_train_batch_size * args.world_size)
    trainer = Trainer(model=model, args=args, train_dataset=ds, callbacks=[Save])
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(metrics, total)
        trainer.model.save_pretrained("final")
    trainer.save_model("o")
    trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main([])
