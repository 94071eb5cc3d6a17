"""One client's local training (LeNet-5, 28×28×1, 100 images, batch 10, one epoch), one thread, beside a plain loop.

`dataloader`: DataLoader, nn.Module.zero_grad, backward, torch.optim.SGD, as in most tutorials.
`tensors`: the same without a DataLoader. `fedbcgd`: Client.fit, encoding of the upload included.
"""

import copy
import statistics

import torch
import torch.nn.functional as F
from interleave import interleaved, ratios
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

from fedbcgd import Client, Server, make_algorithm
from fedbcgd.data import fashion_mnist
from fedbcgd.models import LeNet5
from fedbcgd.objective import objective
from fedbcgd.streams import stream


def measure(console: Console, repeats: int = 15) -> list[dict]:
    console.print(f"local training of one client, {repeats} turns", highlight=False)
    torch.set_num_threads(1)
    train, _ = fashion_mnist()
    x, y = train.gather(torch.arange(100), stream(0, "bench"))
    base = LeNet5(10, (1, 28, 28))

    def plain(batches) -> None:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
        for a, b in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            optimizer.step()

    def ours(name: str):
        algorithm = make_algorithm(name, batch_size=10, local_epochs=1)
        module = copy.deepcopy(base).to(memory_format=torch.channels_last)
        layout = algorithm.uplink.layout(module)
        client = Client(algorithm, layout, module, objective(), 0)
        server = Server(algorithm, layout, client.model.vector, 1, 1, 0)
        plan = server.plan()
        data = train.subset(torch.arange(100))
        return lambda: client.fit(plan.broadcast, plan.tasks[0], data, {})

    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    ways = {
        "dataloader": lambda: plain(loader),
        "tensors": lambda: plain((x[k], y[k]) for k in torch.randperm(100).split(10)),
        "fedbcgd: fedavg": ours("fedavg"),
        "fedbcgd: fedbcgd": ours("fedbcgd"),
        "fedbcgd: fedpaq": ours("fedpaq"),
        "fedbcgd: scaffold": ours("scaffold"),
    }
    seconds = interleaved(ways, repeats)
    fast = ratios(seconds, "dataloader")
    return [
        {"way": name, "ms a client": 1e3 * statistics.median(times), "times as fast": fast[name]}
        for name, times in seconds.items()
    ]
