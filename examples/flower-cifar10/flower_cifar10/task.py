"""What server and clients share: the model and the data."""

import logging
from functools import cache

import torch
from flwr.app import Context
from torch import nn

from fedbcgd.data import dirichlet, store
from fedbcgd.data.images import Images
from fedbcgd.models import LeNet5


@cache
def data(name: str) -> store.DataSet:
    """The data set of that name; the images in the package where CIFAR-10 is not here (`fedbcgd data get cifar10`)."""
    if name == "cifar10" and name not in store.stored_names():
        logging.getLogger("flwr").warning("cifar10 is not on this machine: the embedded images are used instead")
        name = "embedded"
    return store.load(name)


def make_model(context: Context) -> nn.Module:
    found = data(str(context.run_config["data"]))
    torch.manual_seed(int(context.run_config["seed"]))
    return LeNet5(len(found.classes), found.shape)


def load_data(client: int, context: Context) -> Images:
    """This client's part. On real machines each node would read a folder of its own here."""
    config = context.run_config
    train = data(str(config["data"])).train.shown_as(augment=True)
    parts = dirichlet(train.labels.numpy(), int(config["clients"]), 0.6, int(config["seed"]))
    rows = torch.from_numpy(parts[client])
    return train.subset(rows[: int(config["examples"]) or len(rows)])


def load_test(client: int, context: Context) -> Images:
    """A few test images for each client, to show evaluation on clients."""
    test = data(str(context.run_config["data"])).test
    return test.subset(torch.arange(client, len(test), int(context.run_config["clients"]))[:200])
