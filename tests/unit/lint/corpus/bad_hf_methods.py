# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
import torch
from transformers import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback
from transformers import AutoModelForSeq2SeqLM as M


@dataclass
class Opts:
    total_batch_size: int = 128


class Rank0Eval(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kw):
        if state.is_world_process_zero and state.global_step % 100 == 0:
            self.trainer.predict(self.trainer.eval_dataset)  # expect: DDP220


def main(ds):
    (opts,) = HfArgumentParser(Opts).parse_args_into_dataclasses()
    model = M.from_pretrained("t5-small")
    args = Seq2SeqTrainingArguments("o", per_device_train_batch_size=opts.total_batch_size)  # expect: DDP414
    trainer = Seq2SeqTrainer(model, args, train_dataset=ds)
    trainer.add_callback(Rank0Eval(trainer))
    trainer.model_wrapped = torch.nn.parallel.DistributedDataParallel(trainer.model)  # expect: DDP337
    trainer.train()
    trainer.model.save_pretrained("final")  # expect: DDP603


if __name__ == "__main__":
    main(None)
