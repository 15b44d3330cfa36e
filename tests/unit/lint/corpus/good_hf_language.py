# SPDX-License-Identifier: Apache-2.0
import logging
import os
import sys
import datasets
import torch
import transformers
from transformers import AutoConfig, AutoModelForMaskedLM, HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


class Custom(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weight = torch.ones(2, device=self.args.device)
        out = model(**inputs)
        loss = (out.loss * weight).mean()
        if self.state.global_step % 100 == 0 and self.is_world_process_zero():
            print(loss.item())
        return (loss, out) if return_outputs else loss


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    if args.local_rank in (-1, 0):
        logging.basicConfig(level=logging.INFO)
    logger.warning("rank %s, n_gpu %s", args.local_rank, args.n_gpu)
    set_seed(args.seed)
    raw = datasets.load_dataset("wikitext")
    model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained("bert-base-uncased"))
    with args.main_process_first(desc="map"):
        raw = raw.map(lambda x: x)
    trainer = Custom(model=model, args=args, train_dataset=raw["train"], eval_dataset=raw["validation"])
    result = trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        with open(os.path.join(args.output_dir, "x.txt"), "w") as f:
            f.write(str(metrics))
    if args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
