# SPDX-License-Identifier: Apache-2.0
"""Faults behind other names."""

import torch
from torch import distributed as td
from torch.nn import parallel as par
from torch.utils import data as tdata

Wrapper = par.DistributedDataParallel
sync = td.barrier


class Experiment:
    def __init__(self, net, dataset):
        td.init_process_group("gloo")  # expect: DDP605
        self.chief = td.get_rank() == 0
        self.parts = self._wrap(net)
        self.feed = self._feed(dataset)
        self.opt = torch.optim.SGD(net.parameters(), 0.1)

    def _wrap(self, net):
        wrapped = Wrapper(net)
        return {"net": wrapped}

    def _feed(self, dataset):
        options = dict(batch_size=4)
        loader = tdata.DataLoader(dataset, shuffle=True, batch_size=options["batch_size"])  # expect: DDP401
        return loader

    def fit(self):
        for batch in self.feed:
            out = self.parts["net"](batch)
            out.sum().backward()
            self.opt.step()
        if self.chief:
            self.finish()  # expect: DDP220

    def finish(self):
        torch.save(self.parts["net"].state_dict(), "net.pt")  # expect: DDP602
        sync()


if __name__ == "__main__":
    Experiment(torch.nn.Linear(2, 2), list(range(10))).fit()
