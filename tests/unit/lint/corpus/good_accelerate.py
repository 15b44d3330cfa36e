# SPDX-License-Identifier: Apache-2.0
"""Accelerate's example of text classification, shortened."""

import torch
from accelerate import Accelerator
from torch.optim import AdamW
from torch.utils.data import DataLoader


def get_dataloaders(accelerator, train_set, eval_set, batch_size=16):
    with accelerator.main_process_first():
        pass
    train_dataloader = DataLoader(train_set, shuffle=True, batch_size=batch_size, drop_last=True)
    eval_dataloader = DataLoader(eval_set, shuffle=False, batch_size=32)
    return train_dataloader, eval_dataloader


def training_function(config, args, model, train_set, eval_set):
    accelerator = Accelerator(
        cpu=args.cpu, mixed_precision=args.mixed_precision, gradient_accumulation_steps=config["accumulate"]
    )
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, train_set, eval_set)
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        correct = total = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += (predictions == references).sum().item()
            total += references.numel()
        accelerator.print(f"epoch {epoch}:", correct / total)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()
