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


def one_client(name: str, images: int, **options):
    """A call that trains one client of LeNet-5, as a worker does."""
    train, _ = fashion_mnist()
    algorithm = make_algorithm(name, **options)
    module = LeNet5(10, (1, 28, 28)).to(memory_format=torch.channels_last)
    layout = algorithm.uplink.layout(module)
    client = Client(algorithm, layout, module, objective(), 0)
    plan = Server(algorithm, layout, client.model.vector, 1, 1, 0).plan()
    data = train.subset(torch.arange(images))
    return lambda: client.fit(plan.broadcast, plan.tasks[0], data, {})


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

    options = {"batch_size": 10, "local_epochs": 1}
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    ways = {
        "dataloader": lambda: plain(loader),
        "tensors": lambda: plain((x[k], y[k]) for k in torch.randperm(100).split(10)),
        "fedbcgd: fedavg": one_client("fedavg", 100, **options),
        "fedbcgd: fedbcgd": one_client("fedbcgd", 100, **options),
        "fedbcgd: fedpaq": one_client("fedpaq", 100, **options),
        "fedbcgd: scaffold": one_client("scaffold", 100, **options),
    }
    seconds = interleaved(ways, repeats)
    fast = ratios(seconds, "dataloader")
    return [
        {"way": name, "ms a client": 1e3 * statistics.median(times), "times as fast": fast[name]}
        for name, times in seconds.items()
    ]
