"""Raw PyTorch doing the same client steps, without anything federated.

`Pair`: two processes of one thread with the same tricks: resident floats, channels_last, `autograd.grad`, foreach updates,
allocator settings. A client is: the global values copied into the model, and its steps. Nothing is sent anywhere.
`naive`: one process with as many threads as cores, a DataLoader for each client, backward, torch.optim.SGD.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset
from workloads import DECAY, LR, WORKLOADS, Workload

from fedbcgd.carriers.workers import ENVIRONMENT, cores
from fedbcgd.threads import threads


class Tricks:
    """One process's share of the raw work."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.module = workload.module()
        if workload.convolutional:
            self.module = self.module.to(memory_format=torch.channels_last)
        self.parameters = list(self.module.parameters())
        self.start = [p.detach().clone(memory_format=torch.preserve_format) for p in self.parameters]
        self.x, self.y = workload.floats()

    def client(self, k: int) -> None:
        w = self.workload
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.start)
        for rows in w.rows(k)[torch.randperm(w.images)].split(w.batch):
            loss = F.cross_entropy(self.module(self.x.index_select(0, rows)), self.y[rows])
            gradients = list(torch.autograd.grad(loss, self.parameters))
            with torch.no_grad():
                torch._foreach_add_(gradients, self.parameters, alpha=DECAY)
                torch._foreach_add_(self.parameters, gradients, alpha=-LR)


class Pair:
    """Processes of one thread each, started as our workers are. `turn` has some clients trained, half by each."""

    def __init__(self, name: str, count: int = 2):
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__)), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **ENVIRONMENT},
            )
            for _ in range(count)
        ]
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()  # it is ready

    def turn(self, clients: range) -> None:
        count = len(self._processes)
        for k, process in enumerate(self._processes):
            assert process.stdin is not None
            process.stdin.write((" ".join(map(str, clients[k::count])) + "\n").encode())
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def naive(workload: Workload) -> Callable[[range], None]:
    x, y = workload.floats()
    data = TensorDataset(x.contiguous(), y)
    module = workload.module()
    start = {name: t.clone() for name, t in module.state_dict().items()}

    def turn(clients: range) -> None:
        with threads(cores()):
            for k in clients:
                module.load_state_dict(start)
                optimizer = torch.optim.SGD(module.parameters(), lr=LR, weight_decay=DECAY)
                for a, b in DataLoader(Subset(data, workload.rows(k).tolist()), workload.batch, shuffle=True):
                    optimizer.zero_grad()
                    F.cross_entropy(module(a), b).backward()
                    optimizer.step()

    return turn


def main() -> None:
    torch.set_num_threads(1)
    work = Tricks(WORKLOADS[sys.argv[1]])
    print("ready", flush=True)
    for line in sys.stdin:
        for k in map(int, line.split()):
            work.client(k)
        print("done", flush=True)


if __name__ == "__main__":
    main()
