# SPDX-License-Identifier: Apache-2.0
"""Fine-tune with Transformers' models and a loop of torch; one GPU."""

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, get_scheduler

batch_size = 16


def main(train):
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased").to("cuda:0")
    loader = DataLoader(train, batch_size=batch_size, shuffle=True)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-5)
    total = len(train) // batch_size * 3
    sched = get_scheduler("linear", opt, num_warmup_steps=0, num_training_steps=total)
    for epoch in range(3):
        for batch in loader:
            loss = model(**{k: v.to("cuda:0") for k, v in batch.items()}).loss
            loss.backward()
            opt.step()
            sched.step()
            opt.zero_grad()
            print(loss.item())
    torch.save(model.state_dict(), "m.pt")
    model.save_pretrained("out")
    again = torch.load("m.pt")
    model.load_state_dict(again)


main([])
