"""The ClientApp: an ordinary one."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedbcgd.flower
from images_app.task import Net, load_data
from images_app.task import test as test_net
from images_app.task import train as train_net

app = ClientApp()


@fedbcgd.flower.train(app)
def train(msg: Message, context: Context) -> Message:
    """Train the received model on this client's data."""
    net, device = received(msg)
    training, _ = data(context)
    config = msg.content["config"]
    loss = train_net(net, training, context.run_config["local-epochs"], config["lr"], device)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(training.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the received model on this client's data."""
    net, device = received(msg)
    _, validation = data(context)
    loss, accuracy = test_net(net, validation, device)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(validation.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)


def received(msg):
    """The model in a message, and where to compute."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return net, torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def data(context):
    """Loaders of this client's data."""
    node, run = context.node_config, context.run_config
    return load_data(node["partition-id"], node["num-partitions"], run["batch-size"], run["examples"])
