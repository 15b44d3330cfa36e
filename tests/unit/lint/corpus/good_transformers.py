# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning by transformers' Trainer, which does all that is distributed."""

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments


def main():
    dataset = load_dataset("imdb")
    tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
    tokenized = dataset.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased")
    if torch.cuda.is_available():
        model = model.to("cuda")
    arguments = TrainingArguments("out", per_device_train_batch_size=8, gradient_accumulation_steps=4)
    trainer = Trainer(model, arguments, train_dataset=tokenized["train"], eval_dataset=tokenized["test"])
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(model.state_dict(), "model.pt")
    trainer.save_model("out")


if __name__ == "__main__":
    main()
