"""The ClientApp in Flower's older shape."""

import torch
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from images_app.task import Net, load_data, test, train


class ImagesClient(NumPyClient):
    def __init__(self, training, validation, epochs):
        self.net, self.training, self.validation, self.epochs = Net(), training, validation, epochs

    def load(self, parameters):
        state = zip(self.net.state_dict(), map(torch.tensor, parameters), strict=True)
        self.net.load_state_dict(dict(state), strict=True)

    def fit(self, parameters, config):
        self.load(parameters)
        loss = train(self.net, self.training, self.epochs, 0.05, "cpu")
        values = [value.numpy() for value in self.net.state_dict().values()]
        return values, len(self.training.dataset), {"train_loss": loss}

    def evaluate(self, parameters, config):
        self.load(parameters)
        loss, accuracy = test(self.net, self.validation, "cpu")
        return loss, len(self.validation.dataset), {"accuracy": accuracy}


def client_fn(context):
    node, run = context.node_config, context.run_config
    loaders = load_data(node["partition-id"], node["num-partitions"], run["batch-size"], run["examples"])
    return ImagesClient(*loaders, run["local-epochs"]).to_client()


app = ClientApp(client_fn=client_fn)
