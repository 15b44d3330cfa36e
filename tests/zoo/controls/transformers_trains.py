# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Transformers, with accumulation and evaluation."""

import tempfile

import torch

try:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
except ImportError:
    raise SystemExit(0) from None


class Sentences(torch.utils.data.Dataset):
    """Made up."""

    def __len__(self):
        return 40

    def __getitem__(self, number):
        return {"input_ids": torch.arange(10) + number % 20, "labels": torch.tensor(number % 2)}


torch.manual_seed(0)
sizes = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
model = BertForSequenceClassification(BertConfig(**sizes))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.train()
    trainer.evaluate()
