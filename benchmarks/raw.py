"""The same client steps in raw PyTorch, without anything federated, in separate processes.

`Children(name, "tricks", 2)`: two processes of one thread with the tricks that fedbcgd uses: resident floats, channels_last,
`autograd.grad`, fused updates, pool before ReLU, allocator settings. A client copies the global values into the
model and makes its steps. Nothing is sent.
`Children(name, "naive", 1)`: one process with as many threads as cores: a DataLoader for each client, backward,
torch.optim.SGD, the model in its usual form.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset
from workloads import DECAY, LR, WORKLOADS, Workload

from fedbcgd.backends.workers.processes import ENVIRONMENT, cores

STEP = {
    **{"weight_decay": DECAY, "momentum": 0.0, "lr": LR, "dampening": 0.0},
    **{"nesterov": False, "maximize": False, "is_first_step": False},
}


class Tricks:
    def __init__(self, workload: Workload):
        torch.set_num_threads(1)
        self.workload = workload
        self.module = workload.module()
        if workload.convolutional:
            self.module = self.module.to(memory_format=torch.channels_last)
        self.parameters = list(self.module.parameters())
        self.start = [p.detach().clone(memory_format=torch.preserve_format) for p in self.parameters]
        x, self.y = workload.floats()
        self.x = (
            x.permute(0, 2, 3, 1) if workload.convolutional else x
        )  # as it lies in memory: rows are then gathered so

    def batch(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.x.index_select(0, rows)
        return x.permute(0, 3, 1, 2) if self.workload.convolutional else x

    def client(self, k: int) -> None:
        w = self.workload
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.start)
        for rows in w.rows(k)[torch.randperm(w.images)].split(w.batch):
            loss = F.cross_entropy(self.module(self.batch(rows)), self.y[rows])
            gradients = list(torch.autograd.grad(loss, self.parameters))
            with torch.no_grad():
                torch._fused_sgd_(self.parameters, gradients, [], **STEP)


class Naive:
    def __init__(self, workload: Workload, threads: int | None = None):
        torch.set_num_threads(threads or cores())
        self.workload = workload
        x, y = workload.floats()
        self.data = TensorDataset(x.contiguous(), y)
        self.module = workload.module(usual=True)
        self.start = {name: t.clone() for name, t in self.module.state_dict().items()}

    def client(self, k: int) -> None:
        w = self.workload
        self.module.load_state_dict(self.start)
        optimizer = torch.optim.SGD(self.module.parameters(), lr=LR, weight_decay=DECAY)
        for a, b in DataLoader(Subset(self.data, w.rows(k).tolist()), w.batch, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(self.module(a), b).backward()
            optimizer.step()


class Children:
    """Processes that train clients at each call of `turn`, each its share."""

    def __init__(self, name: str, way: str, count: int):
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__)), name, way],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **(ENVIRONMENT if way == "tricks" else {})},
                text=True,
            )
            for _ in range(count)
        ]
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()  # wait until it is ready

    def turn(self, clients: range) -> None:
        for k, process in enumerate(self._processes):
            assert process.stdin is not None
            process.stdin.write(" ".join(map(str, clients[k :: len(self._processes)])) + "\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def main() -> None:
    work = {"tricks": Tricks, "naive": Naive}[sys.argv[2]](WORKLOADS[sys.argv[1]])
    print("ready", flush=True)
    for line in sys.stdin:
        for k in map(int, line.split()):
            work.client(k)
        print("done", flush=True)


if __name__ == "__main__":
    main()
