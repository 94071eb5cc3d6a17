"""The ServerApp in Flower's older shape."""

from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp
from images_app.task import Net


def server_fn(context):
    net = Net()
    parameters = ndarrays_to_parameters([value.numpy() for value in net.state_dict().values()])
    strategy = FedAvg(fraction_fit=1.0, initial_parameters=parameters)
    config = ServerConfig(num_rounds=context.run_config["num-server-rounds"], round_timeout=120)
    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server_fn)
